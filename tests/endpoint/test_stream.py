"""Streamed answers add up to the unstreamed ones, by both ways in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.endpoint.parse import Format, parse
from agentrl.endpoint.reply import message_of
from agentrl.endpoint.stream import _certain
from agentrl.errors import ContractError, EngineError

USER = {"role": "user", "content": "q1"}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"expression": "1"}}\n</tool_call>'
TEXT = f"<think>\nhm\n</think>\n\nok é\n{CALL}<|im_end|>"


async def collect(stream: Any) -> dict[str, Any]:
    """Add the deltas up."""
    message: dict[str, Any] = {"finish": [], "usage": None, "parts": 0}
    async for chunk in stream:
        message["parts"] += 1
        message["usage"] = chunk.usage.completion_tokens if chunk.usage else message["usage"]
        for choice in chunk.choices:
            for name, value in choice.delta.model_dump(exclude_none=True).items():
                empty: Any = [] if isinstance(value, list) else ""
                message[name] = message.get(name, empty) + value
            if choice.finish_reason:
                message["finish"].append(choice.finish_reason)
    return message


async def test_a_stream_adds_up_to_the_message(setup: Callable[..., Any], ask: Any, calculator: Any) -> None:
    s = setup([TEXT], token_delay=0.005)
    await s.endpoint.start()
    whole = await ask(s.open(), [USER], tools=[calculator])
    for kind in ("direct", "http"):
        session = s.open()
        client = session if kind == "direct" else session.openai()
        settings: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "tools": [calculator]}
        found = await collect(await client.chat.completions.create(model="m", messages=[USER], **settings))
        assert found["finish"] == ["tool_calls"]
        assert found["usage"] == len(s.template.encode_text(TEXT))
        assert found["parts"] > 6, "it came in pieces"
        for name in ("role", "content", "reasoning_content"):
            assert found[name] == whole[name]
        assert [c["function"] for c in found["tool_calls"]] == [c["function"] for c in whole["tool_calls"]]
        (trajectory,) = await session.close()
        assert s.template.decode(trajectory.tokens).endswith(TEXT)
    await s.endpoint.stop()


async def test_a_stream_may_be_left_and_then_aborts(setup: Callable[..., Any]) -> None:
    s = setup(["abcdefghij" * 20], token_delay=0.01)
    await s.endpoint.start()
    for kind in ("direct", "http"):
        session = s.open()
        client = session if kind == "direct" else session.openai()
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        async for _ in stream:
            break
        assert s.engine.running == 1
        await stream.close()
        async with asyncio.timeout(5):
            while s.engine.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await session.close() == ()
    await s.endpoint.stop()


async def test_errors_before_and_within_a_stream(setup: Callable[..., Any]) -> None:
    s = setup(["abcdef"], token_delay=0.05)
    await s.endpoint.start()
    client = s.open().openai()
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="m", messages=[USER], stream=True, top_p=0.1)
    with pytest.raises(ContractError, match="top_p"):
        await collect(await s.open().chat.completions.create(model="m", messages=[USER], stream=True, top_p=0.1))

    def breaks(prompt: Any) -> Any:
        yield from (65, 66, 67, 68)
        raise EngineError("the engine is lost")

    s.engine.reply = breaks
    session = s.open()
    stream = await session.openai().chat.completions.create(model="m", messages=[USER], stream=True)
    with pytest.raises(openai.APIError, match="engine is lost"):
        await collect(stream)
    assert await session.close() == ()
    await s.endpoint.stop()


async def test_choices_stream_side_by_side(setup: Callable[..., Any]) -> None:
    session = setup(["aa<|im_end|>", "bb<|im_end|>"]).open()
    stream = await session.chat.completions.create(model="m", messages=[USER], stream=True, n=2)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "aa", 1: "bb"}
    assert len(await session.close()) == 2


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "f", "arguments": {}}',
    "\n",
    " ",
    "x",
    "<",
    "{",
]


@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=10).map("".join),
    st.sampled_from(list(Format)),
    st.booleans(),
    st.booleans(),
)
def test_what_was_streamed_is_a_prefix_of_the_end(text: str, form: Format, thinking: bool, truncated: bool) -> None:
    final = message_of(parse(text, form, thinking=thinking, truncated=truncated), 0)
    for size in range(len(text) + 1):
        so_far = text[:size]
        parsed = parse(so_far[: _certain(so_far, form, ())], form, thinking=thinking, truncated=True)
        content = parsed.content if parsed.content.strip() else ""
        assert (final.get("content") or "").startswith(content)
        assert (final.get("reasoning_content") or "").startswith(parsed.reasoning or "")
