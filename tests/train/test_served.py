"""A trained export, served by a real SGLang: the greedy text and the log-probs of the trainer's own forward pass."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer, start_engine
from agentrl.types import Version
from tests.engine.kit import request, vivid_model
from tests.train.group import Outcome, run_groups

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Exports of two ranks: of all weights, and of merged adapters."""
    work = tmp_path_factory.mktemp("served")
    return run_groups(work, vivid_model(work / "model", 0, kv_heads=2, layers=2), {2: ["serve:all", "serve:lora"]})


@pytest.fixture(scope="module")
def server(trained: Outcome) -> Iterator[EngineServer]:
    python = os.environ.get("AGENTRL_SGLANG_PYTHON")
    if not python:
        pytest.fail("AGENTRL_SGLANG_PYTHON does not name the interpreter that has SGLang")
    options = EngineOptions(
        kind="sglang", python=Path(python), context_length=512, device="cpu", startup_timeout=1800.0
    )
    started = start_engine(options, trained.work / "served-all", Version(1, 0), trained.work / "engine.log")
    try:
        asyncio.run(started.wait_ready())
        yield started
    finally:
        asyncio.run(started.stop())


def told(trained: Outcome, name: str) -> list[dict[str, Any]]:
    """Prompts, tokens and log-probs that the trainer wrote down."""
    found: list[dict[str, Any]] = json.loads((trained.work / f"served-{name}.json").read_text())
    return found


async def check(client: EngineClient, name: str, told: list[dict[str, Any]]) -> None:
    for number, said in enumerate(told):
        asked = request(f"{name}-{number}", said["prompt"], max_tokens=24, temperature=0.0, seconds=900.0)
        completion = await client.generate(asked)
        assert completion.tokens.tolist() == said["tokens"]
        np.testing.assert_allclose(completion.logprobs, said["logprobs"], atol=1e-4)


async def test_a_trained_export_says_what_the_trainer_says(server: EngineServer, trained: Outcome) -> None:
    client = server.client()
    try:
        await check(client, "all", told(trained, "all"))
        await client.update_from_disk(trained.work / "served-lora", Version(1, 1))
        await check(client, "lora", told(trained, "lora"))
    finally:
        await client.close()
