"""What the engine tests share: requests, models whose versions differ visibly, and the oracle."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from agentrl.engine.types import GenerateRequest, Sampling
from agentrl.testing.tiny import make_tiny_model


def request(
    id: str, prompt: list[int] | None = None, *, seconds: float = 600.0, session: str = "", **sampling: Any
) -> GenerateRequest:
    sampling.setdefault("max_tokens", 8)
    deadline = asyncio.get_running_loop().time() + seconds
    tokens = np.array(prompt or [5, 6, 7], np.int32)
    return GenerateRequest(id, session or id, tokens, Sampling(**sampling), deadline)


async def until(ready: Callable[[], object], seconds: float = 100.0) -> None:
    """Wait for what a test needs before it acts: a time would be too short on a machine that stands still."""
    async with asyncio.timeout(seconds):
        while not ready():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@contextmanager
def own_port() -> Iterator[int]:
    """A port on which nobody listens and that no other process is given: servers of ours can come and go on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def clock() -> Callable[[float], None]:
    """Moves the running loop's clock on by so many seconds, so that a deadline passes when the test says and not when
    the machine is slow."""
    loop = asyncio.get_running_loop()
    ahead = 0.0

    def move(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    loop.time = lambda: time.monotonic() + ahead  # type: ignore[method-assign]
    return move


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def vivid_model(folder: Path, seed: int, **shape: Any) -> Path:
    """A tiny model whose matrices are scaled up, so that two seeds differ by whole nats; it has no end token."""
    make_tiny_model(folder, seed=seed, **shape)
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    path = folder / "model.safetensors"
    rng = np.random.default_rng(seed)
    scaled = {}
    for name, tensor in load_file(path).items():
        noise = 0.1 * rng.standard_normal(tensor.shape).astype(np.float32)
        scaled[name] = tensor * 6 if tensor.ndim == 2 else tensor + noise
    save_file(scaled, path, metadata={"format": "pt"})
    return folder
