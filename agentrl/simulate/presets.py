"""Costs from first principles: a device's data sheet, a model's shape, and five shares of the peak with their origin.

Nothing here was fitted to a run. The shares were fixed before the simulator was compared with anything, see
docs/sizing.md; a run's own metrics (`calibrate`) are better where there are any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.simulate.cost import EngineCost, TrainCost, Workload


@dataclass(frozen=True, slots=True)
class Device:
    """A data sheet: dense bf16 FLOP/s, bytes/s of memory, bytes of memory, bytes/s of network a device."""

    flops: float
    bandwidth: float
    memory: float
    network: float


DEVICES: Mapping[str, Device] = {
    "a100": Device(312e12, 2.04e12, 80e9, 25e9),
    "h100": Device(989e12, 3.35e12, 80e9, 50e9),
    "h800": Device(989e12, 3.35e12, 80e9, 50e9),
    "h200": Device(989e12, 4.8e12, 141e9, 50e9),
    "b200": Device(2250e12, 8.0e12, 180e9, 50e9),
}
"""NVIDIA's data sheets of the SXM forms; network: one 200, 400 Gbit/s adapter a device. An H800 is an H100 with slower
NVLink, which matters to tensor parallelism alone."""

BANDWIDTH_SHARE = 0.8
"""Of memory bandwidth while decoding: what STREAM-like kernels reach, and flash-decoding on long contexts."""
DECODE_SHARE = 0.5
"""Of peak FLOP/s in the matrix products of a decode step, whose batches are small."""
PREFILL_SHARE = 0.5
"""Of peak FLOP/s in prefill."""
TRAIN_SHARE = 0.4
"""Of peak FLOP/s in training, recomputed activations counted: Megatron-LM publishes 0.40 to 0.47 on H100s."""
NETWORK_SHARE = 0.8
"""Of the adapters' rate in collectives."""
LAUNCH = 2e-3
"""Seconds of a decode step beside arithmetic and memory: scheduling and sampling with CUDA graphs; as much again, half,
for each doubling of tensor parallelism."""
DISK = 5e9
"""Bytes/s at which weights are written, and read by each engine: NVMe, or a shared file system's page cache."""
LOAD = 1.0
"""Seconds of a publish beside reading."""
KV_MEMORY = 0.85
"""Of device memory for weights and cache, or states and activations."""
ACTIVATION = 34.0
"""Bytes kept for the backward pass a token, layer and hidden dimension, in 16 bits."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense transformer."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Dimensions of one head."""

    @property
    def kv_bytes(self) -> float:
        """Cache of one token in 16 bits."""
        return 2.0 * 2 * self.layers * self.kv_heads * self.head

    @property
    def attention(self) -> float:
        """FLOPs of one forward pass a squared token of a causal sequence: scores and values, half of each masked."""
        return 2.0 * self.layers * self.heads * self.head


SHAPES: Mapping[str, Shape] = {
    "qwen2.5-0.5b": Shape(0.49e9, 24, 14, 2, 64),
    "qwen2.5-1.5b": Shape(1.54e9, 28, 12, 2, 128),
    "qwen2.5-7b": Shape(7.62e9, 28, 28, 4, 128),
    "qwen2.5-14b": Shape(14.8e9, 48, 40, 8, 128),
    "qwen2.5-32b": Shape(32.8e9, 64, 40, 8, 128),
    "qwen2.5-72b": Shape(72.7e9, 80, 64, 8, 128),
    "qwen3-0.6b": Shape(0.6e9, 28, 16, 8, 128),
    "qwen3-1.7b": Shape(1.7e9, 28, 16, 8, 128),
    "qwen3-4b": Shape(4.0e9, 36, 32, 8, 128),
    "qwen3-8b": Shape(8.2e9, 36, 32, 8, 128),
    "qwen3-14b": Shape(14.8e9, 40, 40, 8, 128),
    "qwen3-32b": Shape(32.8e9, 64, 64, 8, 128),
}
"""From the models' config.json. R1-Distill-Qwen models have the Qwen2.5 shapes."""


def device(name: str) -> Device:
    """A preset; ConfigError names those that there are."""
    if name not in DEVICES:
        raise ConfigError(f"simulate.hardware = {name!r} is none of {', '.join(DEVICES)}")
    return DEVICES[name]


def shape(model: str | None, folder: Path) -> Shape:
    """The named shape, or that of the folder's config.json; ConfigError where neither is known."""
    if model is not None:
        if model not in SHAPES:
            raise ConfigError(f"simulate.model = {model!r} is none of {', '.join(SHAPES)}")
        return SHAPES[model]
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there yet: name a shape, e.g. simulate.model=qwen2.5-7b ({', '.join(SHAPES)})"
        )
    return shape_of(json.loads(path.read_text()))


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json of a dense Llama-like model tells; ConfigError where a field is missing."""
    try:
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        inner, words = config["intermediate_size"], config["vocab_size"]
    except KeyError as error:
        raise ConfigError(f"config.json has no {error}: name a shape with simulate.model instead") from error
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    layer = 2 * hidden * head * (heads + kv_heads) + 3 * hidden * inner
    embeddings = words * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return Shape(layers * layer + embeddings, layers, heads, kv_heads, head)


def engine_cost(kind: Device, form: Shape, work: Workload, *, parallel: int, slots: int) -> EngineCost:
    """One server of `parallel` devices. As many sequences run as `slots` says and the cache holds on average."""
    weights = 2.0 * form.parameters
    room = KV_MEMORY * kind.memory * parallel - weights
    if room <= 0:
        raise ConfigError(
            f"{weights / 1e9:.0f} GB of weights do not fit into {parallel} × {kind.memory / 1e9:.0f} GB: raise "
            "engine.tensor_parallel"
        )
    bandwidth = kind.bandwidth * BANDWIDTH_SHARE * parallel
    prefill = kind.flops * PREFILL_SHARE * parallel
    return EngineCost(
        step=weights / bandwidth + LAUNCH * (1 + 0.5 * math.log2(parallel)),
        sequence=2.0 * form.parameters / (kind.flops * DECODE_SHARE * parallel),
        context=form.kv_bytes / bandwidth,
        prefill=(2.0 * form.parameters + form.attention * work.held) / prefill,
        slots=max(1, min(slots, int(room / (form.kv_bytes * work.held)))),
        load=LOAD + weights / (DISK * parallel),
    )


def recomputes(kind: Device, form: Shape, *, longest: float, devices: int, parallel: int = 1) -> bool:
    """Whether activations must be recomputed: those of the longest sequence do not fit beside weights and optimizer.

    34 bytes a token, layer and hidden dimension with flash-attention (arXiv 2205.05198, without its attention term),
    `parallel` devices share them; 18 bytes a parameter of states, spread over all; logits are made in chunks.
    """
    kept = ACTIVATION * form.layers * form.heads * form.head * longest / parallel
    return kept + 18.0 * form.parameters / devices > KV_MEMORY * kind.memory


def train_cost(kind: Device, form: Shape, *, devices: int, minibatches: int, recompute: bool) -> TrainCost:
    """The trainer on `devices`: the proximal pass where there are minibatches, forward and backward, recomputation."""
    passes = 3 + recompute + (minibatches > 1)  # in forward passes: a backward one is two
    rate = kind.flops * TRAIN_SHARE * devices
    reduce = 4.0 * form.parameters / (kind.network * NETWORK_SHARE) if devices > 1 else 0.0  # gradients, then weights
    return TrainCost(
        fixed=minibatches * reduce,
        token=passes * 2.0 * form.parameters / rate,
        square=passes * form.attention / rate,
        hand_over=2.0 * form.parameters / DISK,
    )
