"""A rollout process's engines: those that the conductor names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.cluster.follow import FollowedEngines
from agentrl.engine.client import EngineClient
from agentrl.engine.types import Completion
from agentrl.testing.scripted_server import Fault, ScriptedServer
from tests.engine.kit import request


def _counting(prompt: Sequence[int]) -> list[int]:
    return list(range(prompt[-1] + 1, 60))


async def test_nobody_waits_for_an_engine_that_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.client._ABORT_SECONDS", 3600.0)
    heard = asyncio.Event()

    def on_tokens(so_far: Completion) -> None:
        if len(so_far.tokens) == 3:
            heard.set()

    async with ScriptedServer(_counting, control_delay=3600.0) as lost, ScriptedServer(_counting) as other:
        lost.faults.append(Fault("hang", after=3))
        engines = FollowedEngines(EngineClient)
        engines.follow([lost.url])
        asked = asyncio.create_task(engines.generate(request("r", [9], max_tokens=6), on_tokens))
        async with asyncio.timeout(60):
            await heard.wait()
            engines.follow([other.url])
            assert (await asked).tokens.tolist() == list(range(10, 16))
            assert len(engines._closing) == 1, "the abort is not answered yet"
            while lost.calls[-1][0] != "/abort_request":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await lost.stop()  # which answers it in its way
            await engines.close()
    assert [body["input_ids"] for path, body in other.calls if path == "/generate"] == [[9, 10, 11, 12]]
    assert [path for path, _ in lost.calls] == ["/generate", "/abort_request"]
