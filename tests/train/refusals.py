"""Resumes that must be refused, inside a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.train import persist
from agentrl.train.deepspeed import Backend


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


def _refusal(backend: Backend, saved: Path) -> str:
    try:
        persist.restore(backend, saved)
    except ConfigError as error:
        return str(error)
    return ""
