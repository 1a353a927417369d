"""More of what is checked inside a process group, for tests.train.worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.train import persist
from agentrl.train.batch import Batch
from agentrl.train.deepspeed import Backend, Loss


def refusals(backend: Backend, saved: Path) -> list[str]:
    """What is said where the checkpoint's adapters counted otherwise, and where its frozen weights were others.

    Called by all ranks; the backend is of no use afterwards.
    """
    said = []
    options = backend.options
    if options.lora is not None:
        backend.options = options.model_copy(update={"lora": options.lora.model_copy(update={"alpha": 3.0})})
        said.append(_refusal(backend, saved))
        backend.options = options
    parameters: list[Any] = list(backend._policy.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    if frozen:
        with torch.no_grad():
            frozen[-1].ds_tensor.mul_(1.0001)
        said.append(_refusal(backend, saved))
    return said


def cut_error(backend: Backend, batches: Sequence[Batch], loss: Loss) -> float:
    """How far the gradient is from its own when every pass is repeated, with a part of its weight each time."""
    times, beta = 16, backend.options.betas[0]
    first = _momentum(backend)
    backend.step(batches, loss, lr=0.0)
    second = _momentum(backend)
    backend.step([b.with_weights(b.weights / times) for b in batches for _ in range(times)], loss, lr=0.0)
    third = _momentum(backend)
    whole, parts = second - beta * first, third - beta * second
    return float((whole - parts).norm() / whole.norm())


def _momentum(backend: Backend) -> Tensor:
    return torch.cat([t for name, t in backend.state()[0].items() if name.endswith("/exp_avg")])


def _refusal(backend: Backend, saved: Path) -> str:
    try:
        persist.restore(backend, saved)
    except ConfigError as error:
        return str(error)
    return ""
