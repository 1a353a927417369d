"""The scripted engine keeps the engine's contract."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agentrl.engine.types import GenerateRequest, Sampling, Span
from agentrl.errors import DeadlineExceeded, RequestRefused
from agentrl.testing.scripted import ScriptedEngine
from agentrl.types import Version


def _request(prompt: list[int], sampling: Sampling, seconds: float = 600.0) -> GenerateRequest:
    deadline = asyncio.get_running_loop().time() + seconds
    return GenerateRequest("r", "s", np.array(prompt, np.int32), sampling, deadline)


async def test_budget_and_stop_ids() -> None:
    engine = ScriptedEngine(lambda prompt: [int(prompt[0]), 6, 7, 8])
    cut = await engine.generate(_request([5], Sampling(max_tokens=2)))
    assert (cut.tokens.tolist(), cut.finish, cut.matched) == ([5, 6], "length", None)
    stopped = await engine.generate(_request([5], Sampling(max_tokens=9, stop_token_ids=(7,))))
    assert (stopped.tokens.tolist(), stopped.finish, stopped.matched) == ([5, 6, 7], "stop", 7)
    whole = await engine.generate(_request([5], Sampling(max_tokens=4)))
    assert (whole.tokens.tolist(), whole.finish, whole.logprobs.tolist()) == ([5, 6, 7, 8], "stop", [-0.5] * 4)


async def test_stop_strings_need_a_decoder() -> None:
    with pytest.raises(RequestRefused, match="decode"):
        await ScriptedEngine(lambda _: [1]).generate(_request([5], Sampling(max_tokens=2, stop=("b",))))
    engine = ScriptedEngine(lambda _: [97, 98, 99], decode=lambda ids: "".join(map(chr, ids)))
    done = await engine.generate(_request([5], Sampling(max_tokens=9, stop=("b",))))
    assert (done.tokens.tolist(), done.finish, done.matched) == ([97, 98], "stop", "b")


async def test_versions_are_those_of_each_token() -> None:
    engine = ScriptedEngine(lambda _: [1, 2, 3])

    def publish(partial: object) -> None:
        if engine.version == Version(1, 0):
            engine.set_version(Version(1, 1))

    done = await engine.generate(_request([5], Sampling(max_tokens=9)), publish)
    assert done.spans == (Span(Version(1, 0), 0, 1), Span(Version(1, 1), 1, 3))


async def test_deadline_and_context() -> None:
    with pytest.raises(DeadlineExceeded, match="deadline"):
        await ScriptedEngine(lambda _: [1], delay=1).generate(_request([5], Sampling(max_tokens=2), 0.01))
    with pytest.raises(RequestRefused, match="context 2"):
        await ScriptedEngine(lambda _: [1], context_length=2).generate(_request([5, 6], Sampling(max_tokens=2)))
