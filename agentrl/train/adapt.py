"""What of a model is trained: all of it, the weights that patterns name, or low-rank adapters beside them (LoRA).

Published weights do not show which: an adapter is added to the weight that it adapts while that weight is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.train.options import LoraOptions, TrainOptions

ADAPTER = "default"
_INSIDE = ".base_layer."
"""Where an adapted weight lies below the name that it had."""


class Source(NamedTuple):
    """A weight as it is published: its parameter, and the adapter that is added to it. Read only where gathered."""

    weight: Any
    down: Any = None
    """`[rank, in]`, or None without an adapter."""
    up: Any = None
    """`[out, rank]`."""
    scale: float = 0.0

    @property
    def parameters(self) -> list[Any]:
        """What must be gathered to read it."""
        return [p for p in (self.weight, self.down, self.up) if p is not None]

    def whole(self) -> Tensor:
        """W, or W + scale·up·down: summed in float32 and rounded once."""
        weight: Tensor = self.weight.detach()
        if self.down is None:
            return weight
        added: Tensor = self.up.detach().float() @ self.down.detach().float()
        return added.mul_(self.scale).add_(weight.float()).to(weight.dtype)


def choose_trained(model: nn.Module, options: TrainOptions, seed: int) -> None:
    """Freeze what is not to be trained, and insert adapters where they are asked for; collective under ZeRO-3.

    ConfigError where a pattern names nothing, or where nothing is left to train.
    """
    if options.lora is not None:
        _insert_adapters(model, options.lora, seed)
        return
    named = dict(model.named_parameters())
    trained = set(_matching(named, options.trainable, "train.trainable"))
    trained -= set(_matching(named, options.frozen, "train.frozen"))
    if not trained:
        raise ConfigError(
            f"train.trainable = {list(options.trainable)} without train.frozen = {list(options.frozen)} leaves none of "
            f"{len(named)} weights to train"
        )
    for name, parameter in named.items():
        parameter.requires_grad_(name in trained)


def sources(model: nn.Module) -> dict[str, Source]:
    """Every weight under its Hugging Face name, a tied one once, with what is added to it."""
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        place, inside, kind = name.rpartition(_INSIDE)
        if inside and kind == "weight":
            layer = cast(Any, modules[place])
            pair = (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
            found[f"{place}.weight"] = Source(parameter, *pair, float(layer.scaling[ADAPTER]))
        else:
            found[name.replace(_INSIDE, ".")] = Source(parameter)
    return found


def other_base(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """What is different in what trained weights rest on: how adapters count, or the weights beside them; None: nothing.

    `saved` is None in checkpoints of older versions, which do not tell.
    """
    if saved is None:
        return None
    if saved["lora"] != now["lora"]:
        return f"adapters of train.lora = {saved['lora']}, now {now['lora']}: set it back"
    if saved["dtype"] != now["dtype"]:
        return None  # rounded otherwise
    for name, (total, squares) in now["frozen"].items():
        was = saved["frozen"].get(name, (math.nan, math.nan))
        near = 1e-9 * max(squares, 1e-30)
        if not (abs(was[1] - squares) <= near and abs(was[0] - total) <= 1e-6 * math.sqrt(max(squares, 1e-30))):
            return f"the frozen {name!r} is not the one it was trained with: start from the same model"
    return None


def _insert_adapters(model: nn.Module, options: LoraOptions, seed: int) -> None:
    # Imported where it is wanted: it takes seconds.
    from peft import LoraConfig, inject_adapter_in_model

    head = cast(Any, model).get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    targets = _matching(linear, options.targets, "train.lora.targets")
    dtype = next(model.parameters()).dtype
    model.requires_grad_(False)
    with torch.random.fork_rng():
        # The same adapters on every rank, and in every start of the run.
        torch.manual_seed(seed)
        inject_adapter_in_model(
            LoraConfig(r=options.rank, lora_alpha=cast(int, options.alpha), target_modules=targets, lora_dropout=0.0),
            model,
            ADAPTER,
        )
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            # peft keeps adapters in float32; here the optimizer's master weights are.
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)


def _matching(names: Sequence[str] | dict[str, Any], patterns: Sequence[str], knob: str) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(list(names)[:3])
            raise ConfigError(f"{knob}: {pattern!r} matches none of the model's {len(names)} names, e.g. {shown}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
