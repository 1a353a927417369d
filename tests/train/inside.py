"""More of what is checked inside a process group, for tests.train.worker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def held_back(backend: Backend, place: int, event: threading.Event) -> Iterator[None]:
    """Within, the weights from `place` on come only after `event`, where rank 0 gathers them."""
    plain = backend.weights

    def later(bucket_bytes: int = 0) -> Iterator[tuple[str, Tensor]]:
        for number, named in enumerate(plain(bucket_bytes)):
            if number == place and backend.rank == 0:
                assert event.wait(300.0)
            yield named

    backend.weights = later  # type: ignore[method-assign]
    yield
    del backend.weights


def leave(work: Path, rank: int, world: int, found: dict[str, Any]) -> None:
    """Write down what was found, and wait for the others to: who ends closes its connections, and what it sent last may
    not have been read."""
    results = [work / f"result-{world}-{place}.json" for place in range(world)]
    part = results[rank].with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(results[rank])
    for result in results:
        await_path(result)


def await_path(path: Path) -> None:
    """Wait until another process has made it; tests/train/group.py ends all where one fails."""
    while not path.exists():
        time.sleep(0.05)


def _momentum(backend: Backend) -> Tensor:
    return torch.cat([t for name, t in backend.state()[0].items() if name.endswith("/exp_avg")])


def _refusal(backend: Backend, saved: Path) -> str:
    try:
        persist.restore(backend, saved)
    except ConfigError as error:
        return str(error)
    return ""
