"""Log-probs and the likeliest tokens beside them, in the three forms in which clients read them."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.endpoint.request import Refused
from tests.endpoint.conftest import Ask, MakeSetup

USER = {"role": "user", "content": "q"}
TEXT = "ab<|im_end|>"
LOGPROBS = [pytest.approx(-0.5), pytest.approx(-0.6), pytest.approx(-0.7)]


async def test_likeliest_tokens(setup: MakeSetup) -> None:
    s = setup([TEXT])
    session = s.open()
    reply = await session.chat.completions.create(model="m", messages=[USER], logprobs=True, top_logprobs=3)
    rows = reply.choices[0].logprobs.content
    assert [row.token for row in rows] == ["a", "b", "<|im_end|>"]
    for row in rows:
        assert [top.logprob for top in row.top_logprobs] == LOGPROBS
        assert row.top_logprobs[0].token == row.token
        assert row.top_logprobs[0].bytes == list(row.token.encode())
    assert s.engine.requests[0].sampling.top_logprobs == 3
    (trajectory,) = await session.close()
    assert int(trajectory.loss_mask.sum()) == 3  # they change nothing: the turn is trained


async def test_likeliest_tokens_over_http_and_in_a_stream(setup: MakeSetup) -> None:
    s = setup([TEXT])
    await s.endpoint.start()
    client: Any = s.open().openai()
    asked = {"model": "m", "messages": [USER], "logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(**asked)
    rows = whole.choices[0].logprobs.content
    streamed: list[Any] = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [row.model_dump() for row in streamed] == [row.model_dump() for row in rows]
    assert [len(row.top_logprobs) for row in rows] == [2, 2, 2]
    await s.endpoint.stop()


async def test_likeliest_tokens_of_text_completions(setup: MakeSetup) -> None:
    s = setup([TEXT])
    await s.endpoint.start()
    client = s.open().openai()
    for wanted in (0, 2):
        reply = await client.completions.create(model="m", prompt="q", logprobs=wanted)
        found = reply.choices[0].logprobs
        assert found is not None
        assert found.tokens == ["a", "b", "<|im_end|>"]
        if not wanted:
            assert found.top_logprobs is None
            continue
        assert found.top_logprobs is not None
        assert [len(top) for top in found.top_logprobs] == [2, 2, 2]
        assert found.top_logprobs[0]["a"] == pytest.approx(-0.5)
    await s.endpoint.stop()


async def test_they_need_logprobs(setup: MakeSetup, ask: Ask) -> None:
    with pytest.raises(Refused, match="logprobs = true"):
        await ask(setup().open(), [USER], top_logprobs=2)
