"""The engines under the conformance suite: the embedded one, and a real SGLang where AGENTRL_SGLANG_PYTHON has it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer, start_engine
from agentrl.engine.weights import model_limits
from agentrl.types import Version
from tests.engine.kit import vivid_model


@dataclass
class Models:
    """Folders of three versions of one model."""

    folders: list[Path]
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def next_version(self) -> Version:
        return Version(1, next(self.numbers))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models([vivid_model(root / f"m{seed}", seed) for seed in range(3)])


def _options(kind: str) -> EngineOptions:
    if kind == "embedded":
        return EngineOptions(context_length=1024)
    python = os.environ.get("AGENTRL_SGLANG_PYTHON")
    if not python:
        pytest.fail("AGENTRL_SGLANG_PYTHON does not name the interpreter that has SGLang")
    return EngineOptions(kind="sglang", python=Path(python), context_length=1024, device="cpu")


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def server(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    started = start_engine(_options(request.param), models.folders[0], Version(1, 0), log)
    try:
        asyncio.run(started.wait_ready())
        yield started
    finally:
        asyncio.run(started.stop())


@pytest.fixture
async def client(server: EngineServer, models: Models) -> AsyncIterator[EngineClient]:
    """A client of an engine that serves `models.folders[0]` under a fresh version."""
    speaking = server.client()
    await speaking.update_from_disk(models.folders[0], models.next_version())
    yield speaking
    await speaking.close()


@pytest.fixture
async def in_steps(
    server: EngineServer, client: EngineClient, models: Models
) -> AsyncIterator[Callable[[int], EngineClient]]:
    """Makes clients that ask for so many tokens at a time: where this process stands still, the engine does not get
    ahead of it by more, and a request is still under way when the test goes on."""
    made: list[EngineClient] = []

    def make(tokens: int) -> EngineClient:
        limits, hot = model_limits(models.folders[0]), server.options.hot_swap
        made.append(EngineClient(server.url, limits=limits, chunk_tokens=tokens, hot_swap=hot))
        return made[-1]

    yield make
    for one in made:
        await one.close()
