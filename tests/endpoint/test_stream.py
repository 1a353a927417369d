"""Streamed answers add up to the unstreamed ones, by both ways in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.parse import Format, parse
from agentrl.endpoint.reply import message_of
from agentrl.endpoint.stream import certain
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
    s = setup(["abcdefghij" * 200], token_delay=0.01)
    await s.endpoint.start()
    for kind in ("direct", "http"):
        session = s.open()
        client = session if kind == "direct" else session.openai()
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        async for _ in stream:
            break
        assert s.engine.running == 1
        await stream.close()
        async with asyncio.timeout(60):
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
    '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>',
    "<think>",
    "</think>",
    '{"name": "f", "arguments": {}}',
    "\n",
    " ",
    "x",
    "<",
    "{",
    "<function=f>",
    "<parameter=a>1</parameter>",
    "</function>",
]
NAMED = '{"name": "f", "arguments": {}}'


@example(f"<tool_call>{NAMED}\n<tool_call>", Format.HERMES, False, False)
@example(f"<tool_call>{NAMED}<tool_call>{NAMED}<tool_call>{NAMED}x", Format.HERMES, False, True)
@example(f"\n<tool_call>{NAMED}</tool_call>\n</think>x<think></think>", Format.HERMES, False, False)
@example("x<function=f></function>\n</tool_call>", Format.QWEN3_CODER, False, True)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=10).map("".join),
    st.sampled_from(list(Format)),
    st.booleans(),
    st.booleans(),
)
def test_what_was_streamed_is_a_prefix_of_the_end(text: str, form: Format, thinking: bool, truncated: bool) -> None:
    whole = parse(text, form, thinking=thinking, truncated=truncated)
    final = message_of(whole, ["id"] * len(whole.calls))
    for size in range(len(text) + 1):
        so_far = text[:size]
        sure = so_far[: certain(so_far, form, thinking=thinking)]
        parsed = parse(sure, form, thinking=thinking, truncated=True)
        assert whole.calls[: len(parsed.calls)] == parsed.calls
        assert not parsed.errors
        content = parsed.content if parsed.content.strip() else ""
        assert (final.get("content") or "").startswith(content)
        assert (final.get("reasoning_content") or "").startswith(parsed.reasoning or "")


async def test_a_call_is_sent_when_it_is_closed_and_its_id_is_the_recorded_one(
    setup: Callable[..., Any], calculator: Any
) -> None:
    s = setup([f"{CALL}\n{CALL}\nthen wait<|im_end|>", "ok<|im_end|>"], token_delay=0.004)
    session = s.open()
    calls: list[Any] = []
    text = ""
    create = session.chat.completions.create
    async for chunk in await create(model="m", messages=[USER], tools=[calculator], stream=True):
        for choice in chunk.choices:
            calls += choice.delta.tool_calls or []
            text += choice.delta.content or ""
            if len(calls) == 1 and not text.strip():
                assert s.engine.running == 1, "the first call came while the turn went on"
    assert [call.index for call in calls] == [0, 1]
    assert text == "\n\nthen wait"
    message = {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": c.id, "type": "function", "function": c.function.model_dump()} for c in calls],
    }
    results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in calls]
    await create(model="m", messages=[USER, message, *results], tools=[calculator])
    assert len(await session.close()) == 1, "the history that the stream made is the recorded one"


async def test_log_probs_stream_with_the_tokens(setup: Callable[..., Any]) -> None:
    s = setup(["abcdefghijklm<|im_end|>"], token_delay=0.005)
    await s.endpoint.start()
    session = s.open()
    rows: list[Any] = []
    parts = 0
    stream = await session.openai().chat.completions.create(model="m", messages=[USER], stream=True, logprobs=True)
    async for chunk in stream:
        found = chunk.choices[0].logprobs
        parts += bool(found and found.content)
        rows += found.content if found and found.content else []
    assert "".join(row.token for row in rows) == "abcdefghijklm<|im_end|>"
    assert parts > 2
    assert {row.logprob for row in rows} == {-0.5}
    await s.endpoint.stop()


async def test_text_completions_stream(setup: Callable[..., Any]) -> None:
    s = setup(["<think>a<tool_call>STOP", "b<|im_end|>"], token_delay=0.005)
    await s.endpoint.start()
    client = s.open().openai()
    ask: dict[str, Any] = {"model": "m", "prompt": "once", "stop": "STOP", "logprobs": 1}
    text, finish = "", []
    tokens: list[str] = []
    offsets: list[int] = []
    async for part in await client.completions.create(**ask, stream=True):
        text += part.choices[0].text
        finish.append(part.choices[0].finish_reason)
        if part.choices[0].logprobs is not None:
            tokens += part.choices[0].logprobs.tokens or []
            offsets += part.choices[0].logprobs.text_offset or []
    assert text == "<think>a<tool_call>"
    assert finish[-1] == "stop"
    assert "".join(tokens) == "<think>a<tool_call>STOP"
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    whole = (await client.completions.create(**ask)).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens == ["b", "<|im_end|>"]
    await s.endpoint.stop()


async def test_a_stream_that_is_asked_for_again_is_the_first_one(setup: Callable[..., Any]) -> None:
    s = setup(["a1<|im_end|>", "a2<|im_end|>"], delay=0.5, options=EndpointOptions(retry_grace=600.0))
    await s.endpoint.start()
    session = s.open()
    client = session.openai().with_options(timeout=0.2, max_retries=20)
    call = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[USER], stream=True))
    async with asyncio.timeout(60):
        while not s.engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    client.timeout = 60.0  # the retry may take its time
    found = await collect(await call)
    assert found["content"] == "a1"
    assert len(s.engine.requests) == 1
    assert len(await session.close()) == 1
    await s.endpoint.stop()
