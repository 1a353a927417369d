"""What a run will need, worked out from its config and its model's files before anything starts.

Memory by ZeRO stage as in Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 3: Ψ parameters, N ranks, AdamW with fp32 master weights and moments (12 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.conductor.config import RunConfig
from agentrl.engine.weights import model_config, weight_shapes

OPTIMIZER_BYTES = 12
_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    kv_width: int
    """Key-value heads × their size."""


def model_size(folder: Path) -> ModelSize:
    """Read from config.json and the headers of the weights; ConfigError where they cannot be."""
    config = model_config(folder)
    parameters = 0
    for shape in weight_shapes(folder).values():
        count = 1
        for length in shape:
            count *= length
        parameters += count
    heads = _int(config, "num_attention_heads", 1)
    hidden = _int(config, "hidden_size", 1)
    return ModelSize(
        parameters,
        _int(config, "num_hidden_layers", 1),
        hidden,
        _int(config, "intermediate_size", 4 * hidden),
        _int(config, "num_key_value_heads", heads) * _int(config, "head_dim", hidden // heads),
    )


def trainer_bytes(model: ModelSize, stage: int, ranks: int, dtype: str, *, reference: bool = False) -> int:
    """Weights, gradients and optimizer of one rank under ZeRO `stage` (0 to 3), the frozen reference included.

    Stage 1 shares out the optimizer, 2 the gradients too, 3 the weights too. `train` uses 3.
    """
    width = _WIDTH[dtype]
    weights, gradients, optimizer = (
        model.parameters * each / (ranks if stage >= shared else 1)
        for each, shared in ((width, 3), (width, 2), (OPTIMIZER_BYTES, 1))
    )
    return round(weights + gradients + optimizer + (weights if reference else 0))


def activation_bytes(model: ModelSize, tokens: int, dtype: str, *, checkpointing: bool) -> int:
    """About what one micro-batch of `tokens` keeps for its backward pass; attention by blocks keeps no matrix.

    A layer keeps some ten vectors of the hidden size and four of the intermediate size for each token; with
    checkpointing its input alone, and one layer is recomputed at a time.
    """
    layer = 10 * model.hidden + 4 * model.intermediate
    kept = model.layers * model.hidden + layer if checkpointing else model.layers * layer
    return tokens * kept * _WIDTH[dtype]


def engine_bytes(model: ModelSize, dtype: str, tokens: int, tensor_parallel: int) -> tuple[int, int]:
    """Weights on each GPU (or in the one process), and keys and values of `tokens` cached tokens there."""
    width = _WIDTH[dtype]
    cache = 2 * model.layers * model.kv_width * width * tokens
    return round(model.parameters * width / tensor_parallel), round(cache / tensor_parallel)


def checkpoint_bytes(model: ModelSize, dtype: str) -> int:
    """One checkpoint: fp32 master weights and moments, and the model in `dtype`."""
    return model.parameters * (OPTIMIZER_BYTES + _WIDTH[dtype])


def weights_bytes(model: ModelSize, dtype: str) -> int:
    """One version of the weights on its way to the engines."""
    return model.parameters * _WIDTH[dtype]


@dataclass(frozen=True)
class Pace:
    """How many episodes go on at once, and how stale their tokens may be."""

    groups_live: int
    """Groups that run, wait in the pool or are trained on: (η+1)·B."""
    groups_running: int
    episodes_running: int
    least: float
    """Versions between a group's start and its step where rollouts are the slower side."""
    most: int
    """Where the trainer is the slower side: η, the bound."""
    capped: bool
    """Whether `rollout.concurrency` is what limits the episodes."""


def pace(config: RunConfig) -> Pace:
    """By Little's law a group lives (groups alive) / B steps; its age when its step starts is that less one."""
    rollout = config.rollout
    batch, started = rollout.groups_per_step, rollout.started
    live = (rollout.staleness + 1) * batch
    running = live if rollout.concurrency is None else min(live, rollout.concurrency // started)
    return Pace(
        groups_live=live,
        groups_running=running,
        episodes_running=running * started,
        least=max(0.0, min(running / batch - 1, float(rollout.staleness))),
        most=rollout.staleness,
        capped=running < live,
    )


def _int(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return default if value is None else int(value)
