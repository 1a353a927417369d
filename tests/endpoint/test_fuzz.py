"""The HTTP surface under arbitrary requests: never a 500, never a hang, never a session or a generation left over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.template import ChatTemplate
from agentrl.testing.scripted import ScriptedEngine

EXPECTED = {200, 400, 401, 404, 405, 413}
ANY_TEXT = st.text(max_size=12) | st.sampled_from(
    ["", "user", "tool", "<|im_end|>", "\ud800".encode("utf-8", "replace").decode()]
)
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | ANY_TEXT
JUNK = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(ANY_TEXT, x, max_size=3), max_leaves=6)
CALL = st.fixed_dictionaries(
    {
        "id": st.just("c1") | JUNK,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.just("f") | JUNK, "arguments": st.just("{}") | JUNK}) | JUNK,
    }
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | JUNK, "content": ANY_TEXT | JUNK},
    optional={
        "tool_calls": st.lists(CALL | JUNK, max_size=2) | JUNK,
        "tool_call_id": ANY_TEXT | JUNK,
        "name": JUNK,
        "reasoning_content": ANY_TEXT | JUNK,
        "refusal": JUNK,
    },
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function") | JUNK,
        "function": st.fixed_dictionaries(
            {"name": st.just("f") | JUNK}, optional={"parameters": JUNK, "description": JUNK}
        )
        | JUNK,
    }
)
KNOWN = {
    "max_tokens": st.integers(-1, 20) | JUNK,
    "max_completion_tokens": st.integers(1, 1 << 62) | JUNK,
    "temperature": st.sampled_from([0, 1, 1.0, 0.5]) | JUNK,
    "top_p": st.just(1) | JUNK,
    "top_k": JUNK,
    "n": st.integers(1, 3) | JUNK,
    "seed": st.integers() | JUNK,
    "stop": st.sampled_from(["\n", ["a", "b"], "e"]) | JUNK,
    "stream": st.booleans() | JUNK,
    "stream_options": st.just({"include_usage": True}) | JUNK,
    "logprobs": st.booleans() | st.integers(0, 2) | JUNK,
    "top_logprobs": st.integers(0, 21) | JUNK,
    "regex": ANY_TEXT | JUNK,
    "ebnf": ANY_TEXT | JUNK,
    "tools": st.lists(TOOL, max_size=2) | JUNK,
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}])
    | JUNK,
    "parallel_tool_calls": st.booleans() | JUNK,
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | JUNK,
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["enable_thinking", "tools", "generation", "self"]) | ANY_TEXT, JUNK, max_size=2
    )
    | JUNK,
    "agent": ANY_TEXT | JUNK,
    "user": JUNK,
    "logit_bias": JUNK,
}
CHAT = st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=4) | JUNK}, optional=KNOWN)
TEXT = st.fixed_dictionaries(
    {"prompt": ANY_TEXT | st.lists(st.integers(0, 400), max_size=4) | JUNK},
    optional={**KNOWN, "echo": JUNK, "suffix": JUNK, "best_of": JUNK},
)
BODY = (CHAT | TEXT | JUNK).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)
PATH = st.sampled_from(
    ["chat/completions", "completions", "models", "models/x", "responses", "chat/completions/", "../v1/models", "%00"]
)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "Idempotency-Key": st.sampled_from(["a", "b"]),
        "x-stainless-retry-count": st.sampled_from(["0", "1", "x"]),
        "Content-Type": st.sampled_from(["text/plain", "application/json; charset=utf-16"]),
    },
)
REQUEST = st.tuples(st.sampled_from(["POST", "POST", "POST", "GET", "DELETE"]), PATH, BODY, HEADERS, st.booleans())
LIMITS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


async def send(template: ChatTemplate, requests: list[Any]) -> None:
    turns = iter(range(1 << 30))
    said = ["yes<|im_end|>", "<think>a", '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>', "", "{"]
    engine = ScriptedEngine(
        lambda prompt: template.encode_text(said[next(turns) % len(said)]).tolist(),
        decode=template.decode,
        grammars=True,
    )
    endpoint = Endpoint(engine, template, EndpointOptions(untrained_sampling="mark", retry_grace=0.0))
    await endpoint.start()
    session = endpoint.open("s", seed=1)
    bystander = endpoint.open("other")
    try:
        async with asyncio.timeout(90), aiohttp.ClientSession() as http:
            for method, path, body, headers, with_key in requests:
                url = f"{session.base_url}/{path}" if with_key else f"{endpoint.url}/v1/{path}"
                async with http.request(method, url, data=body, headers=headers) as response:
                    answer = await response.read()
                    assert response.status in EXPECTED, (response.status, answer)
                    if response.status != 200 and method != "DELETE":
                        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
        assert engine.running == 0
        assert endpoint.calls == 0
        for trajectory in await session.close():
            assert len(trajectory) == sum(len(segment) for segment in trajectory.segments)
        assert await bystander.close() == ()
        assert endpoint.open_sessions == 0
    finally:
        await endpoint.stop()


@settings(max_examples=10, **LIMITS)  # type: ignore[arg-type]
@given(requests=st.lists(REQUEST, min_size=5, max_size=12))
def test_any_request_has_an_answer(tiny_once: ChatTemplate, requests: list[Any]) -> None:
    asyncio.run(send(tiny_once, requests))


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=300, **LIMITS)  # type: ignore[arg-type]
@given(requests=st.lists(REQUEST, min_size=5, max_size=20))
def test_many_requests_have_answers(tiny_once: ChatTemplate, requests: list[Any]) -> None:
    asyncio.run(send(tiny_once, requests))


TOOLS_WITH = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'
CALL_WITH = '"tool_calls": [{"function": {"name": "f", "arguments": {"a": %s}}}]'
USER = '{"role": "user", "content": "x"}'


@pytest.mark.parametrize("depth", [200, 900, 5000])
@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [' + USER + "], " + TOOLS_WITH + "}",
        '{"messages": [{"role": "assistant", ' + CALL_WITH + "}]}",
        '{"messages": [{"role": "user", "content": "x", "unknown": %s}]}',
        '{"messages": [' + USER + '], "chat_template_kwargs": {"a": %s}}',
    ],
)
async def test_deep_nesting_is_an_answer(setup: Callable[..., Any], body: str, depth: int) -> None:
    s = setup()
    await s.endpoint.start()
    session = s.open()
    nested = "[" * depth + "]" * depth
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{session.base_url}/chat/completions", data=body % nested) as response,
    ):
        assert response.status in (200, 400)
    await s.endpoint.stop()


async def test_unknown_paths_and_methods_are_answered_in_openais_form(setup: Callable[..., Any]) -> None:
    s = setup()
    await s.endpoint.start()
    session = s.open()
    async with aiohttp.ClientSession() as http:
        for method, path, status in (("POST", "embeddings", 404), ("GET", "chat/completions", 405)):
            async with http.request(method, f"{session.base_url}/{path}") as response:
                assert response.status == status
                assert (await response.json())["error"]["type"] == "invalid_request_error"
    await s.endpoint.stop()
