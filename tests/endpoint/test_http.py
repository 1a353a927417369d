"""The real openai client over HTTP: an episode with tools, isolation, errors, retries, disconnects, capacity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from agentrl.endpoint.options import EndpointOptions
from agentrl.errors import ContractError, EngineError
from agentrl.types import Sampled

USER = {"role": "user", "content": "q1"}
BODY = {"model": "m", "messages": [USER]}


@asynccontextmanager
async def serving(setup: Any) -> AsyncIterator[Any]:
    await setup.endpoint.start()
    try:
        yield setup
    finally:
        await setup.endpoint.stop()


async def post(session: Any, body: Any, **headers: str) -> tuple[int, Any, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as response,
    ):
        return response.status, await response.json(), response.headers


async def test_an_episode_with_tools_is_recorded_as_by_the_direct_session(
    setup: Callable[..., Any], ask: Any, calculator: Any
) -> None:
    thought, arguments = "<think>\nhm\n</think>\n\nok\n", '{"expression": "1"}'
    call = f'{thought}<tool_call>\n{{"name": "calc", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    recorded = []
    async with serving(setup([call, "two<|im_end|>"])) as s:
        for kind in ("direct", "http"):
            session = s.open()
            client = session if kind == "direct" else session.openai()
            messages = [USER]
            answer = await ask(client, messages, tools=[calculator])
            assert answer["reasoning_content"] == "hm"
            assert answer["content"] == "ok\n"
            messages.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "1"})
            await ask(client, messages, tools=[calculator], max_completion_tokens=99)
            assert len(session.marks()) == 1
            recorded.append((messages, await session.close()))
    assert recorded[0] == recorded[1]


async def test_a_session_is_found_by_key_or_path_and_is_alone(setup: Callable[..., Any]) -> None:
    async with serving(setup()) as s:
        one, two = s.open(), s.open()
        by_key = openai.AsyncOpenAI(base_url=f"{s.endpoint.url}/v1", api_key=two.api_key)
        await by_key.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert [m.id for m in (await by_key.models.list()).data] == ["policy"]
        assert (await by_key.models.retrieve("gpt-4o")).id == "gpt-4o"
        await by_key.close()
        assert (one.marks(), len(two.marks())) == ((), 1)
        stranger = openai.AsyncOpenAI(base_url=f"{s.endpoint.url}/v1", api_key="sk-guess")
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        await stranger.close()
        await two.close()
        status, _, _ = await post(two, BODY)
        assert status == 401


async def test_a_public_endpoint_answers_any_key_and_keeps_nothing(setup: Callable[..., Any]) -> None:
    made = setup(["one<|im_end|>"])
    made.endpoint.public = True
    async with serving(made) as s:
        given: Any = openai.AsyncOpenAI(base_url=f"{s.endpoint.url}/v1", api_key="none", max_retries=0)
        async with given as client:

            async def said() -> Any:
                reply = await client.chat.completions.create(**BODY)
                return reply.choices[0].message.content

            assert await asyncio.gather(*[said() for _ in range(8)]) == ["one"] * 8
            streamed = [part async for part in await client.chat.completions.create(**BODY, stream=True)]
            assert "".join(part.choices[0].delta.content or "" for part in streamed if part.choices) == "one"
            assert (await client.models.list()).data[0].id == "policy"
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=[])
        assert s.endpoint.open_sessions == 0
        ids = [request.id for request in s.engine.requests]
        assert len(set(ids)) == len(ids) == 9


async def test_errors_in_openai_form(setup: Callable[..., Any]) -> None:
    async with serving(setup()) as s:
        session = s.open(max_tokens=12)
        client = session.openai()
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[USER], top_p=0.5)
        assert refused.value.param == "top_p"
        assert refused.value.type == "invalid_request_error"
        for _ in range(3):
            await client.chat.completions.create(model="m", messages=[USER])
        with pytest.raises(openai.BadRequestError) as used_up:
            await client.chat.completions.create(model="m", messages=[USER, USER])
        assert used_up.value.code == "context_length_exceeded"
        for body in ("{", "[]", "3", '{"messages": "x"}', '{"messages": [3]}', "[" * 100_000):
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{session.base_url}/chat/completions", data=body) as response,
            ):
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_an_engine_fault_is_503_and_is_not_repeated(setup: Callable[..., Any]) -> None:
    s = setup()

    def fail(prompt: Any) -> list[int]:
        raise EngineError("the engine is lost")

    s.engine.reply = fail
    async with serving(s):
        session = s.open()
        with pytest.raises(openai.InternalServerError) as fault:
            await session.openai().chat.completions.create(model="m", messages=[USER])
        assert fault.value.status_code == 503
        assert len(s.engine.requests) == 1
        assert isinstance(session.failure, EngineError)


async def test_a_token_outside_the_vocabulary_is_an_engine_fault(setup: Callable[..., Any]) -> None:
    s = setup()
    s.engine.reply = lambda prompt: [10**6]
    with pytest.raises(EngineError, match="vocabulary"):
        await s.open().chat.completions.create(model="m", messages=[USER])


async def test_a_timeout_retry_returns_the_first_result(setup: Callable[..., Any]) -> None:
    options = EndpointOptions(retry_grace=600.0)
    async with serving(setup(["a1<|im_end|>", "a2<|im_end|>"], delay=0.6, options=options)) as s:
        session = s.open()
        client = session.openai().with_options(timeout=0.3, max_retries=20)
        call = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[USER]))
        await until(lambda: s.engine.requests)
        client.timeout = 60.0  # the retry may take its time
        reply = await call
        assert reply.choices[0].message.content == "a1"
        assert len(s.engine.requests) == 1
        status, again, _ = await post(session, BODY, **{"Idempotency-Key": "k"})
        assert again["choices"][0]["message"]["content"] == "a2"
        assert (await post(session, BODY, **{"Idempotency-Key": "k"}))[1] == again
        assert status == 200
        first, second = await session.close()
        assert sum(isinstance(x.source, Sampled) for t in (first, second) for x in t.segments) == 2


async def test_the_same_body_without_a_retry_mark_is_a_new_sample(setup: Callable[..., Any]) -> None:
    async with serving(setup(["a1<|im_end|>", "a2<|im_end|>"])) as s:
        session = s.open()
        answers = [(await post(session, BODY))[1]["choices"][0]["message"]["content"] for _ in range(2)]
        assert answers == ["a1", "a2"]


async def test_a_disconnect_aborts(setup: Callable[..., Any]) -> None:
    async with serving(setup(delay=600.0, options=EndpointOptions(retry_grace=0.1))) as s:
        session = s.open()
        call = asyncio.ensure_future(post(session, BODY))
        await until(lambda: s.engine.running == 1)
        call.cancel()
        await until(lambda: s.engine.running == 0)
        assert await session.close() == ()


async def test_closing_a_session_ends_its_calls(setup: Callable[..., Any]) -> None:
    async with serving(setup(delay=600.0)) as s:
        session = s.open()
        call = asyncio.ensure_future(post(session, BODY))
        await until(lambda: s.engine.running == 1)
        await session.close()
        assert s.engine.running == 0
        assert "session was closed" in (await call)[1]["error"]["message"]


async def test_capacity_is_bounded(setup: Callable[..., Any]) -> None:
    async with serving(setup(options=EndpointOptions(max_calls=1))) as s:
        session = s.open()
        s.engine.holds_at = 0
        call = asyncio.ensure_future(post(session, BODY))
        await until(lambda: s.engine.running == 1)
        status, _, headers = await post(session, BODY)
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        s.engine.holds_at = None
        assert (await call)[0] == 200


@pytest.mark.slow
async def test_five_hundred_clients_at_once(setup: Callable[..., Any]) -> None:
    async with serving(setup()) as s:
        sessions = [s.open() for _ in range(500)]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def one(session: Any) -> int:
                async with http.post(f"{session.base_url}/chat/completions", json=BODY) as response:
                    return response.status

            async with asyncio.timeout(90):
                assert set(await asyncio.gather(*map(one, sessions))) == {200}


async def test_http_needs_a_started_endpoint_and_a_free_port(setup: Callable[..., Any]) -> None:
    s = setup()
    with pytest.raises(ContractError, match="not serving yet"):
        _ = s.open().base_url
    async with serving(s):
        port = int(s.endpoint.url.rpartition(":")[2])
        other = setup(options=EndpointOptions(port=port))
        with pytest.raises(Exception, match="cannot listen"):
            await other.endpoint.start()


async def test_text_completions_go_on_from_what_they_said(setup: Callable[..., Any]) -> None:
    async with serving(setup(["two<|im_end|>", "3", "4"])) as s:
        session = s.open()
        client = session.openai()
        prompt = "<|im_start|>1, "
        reply = await client.completions.create(model="m", prompt=prompt, max_tokens=9)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("two", "stop")
        await client.completions.create(model="m", prompt=f"{prompt}two<|im_end|>, ")
        ids = s.template.encode_text(f"{prompt}two<|im_end|>, 3, ").tolist()
        await client.completions.create(model="m", prompt=ids)
        await client.completions.create(model="m", prompt="other")
        for bad in ({"prompt": ""}, {"prompt": ["a", "b"]}, {"prompt": [10**6]}, {"prompt": "a", "echo": True}):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="m", **bad)
        first, other = await session.close()
        assert s.template.decode(first.tokens) == f"{prompt}two<|im_end|>, 3, 4"
        assert s.template.decode(first.tokens[first.loss_mask]) == "two<|im_end|>34"
        assert other.reason == "other"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
