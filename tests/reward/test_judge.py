"""The judge against a real HTTP server that refuses, babbles and counts tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from agentrl.errors import ConfigError
from agentrl.reward.judge import Judge

ROW = {"question": "2+2?", "answer": "4"}
Serve = Callable[..., Awaitable[tuple[str, list[dict[str, Any]]]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners = []

    async def start(*replies: str | int) -> tuple[str, list[dict[str, Any]]]:
        asked: list[dict[str, Any]] = []

        async def answer(request: web.Request) -> web.Response:
            asked.append(await request.json())
            reply = replies[min(len(asked), len(replies)) - 1]
            if isinstance(reply, int):
                return web.json_response({"error": {"message": "busy"}}, status=reply)
            message = {"role": "assistant", "content": reply}
            return web.json_response(
                {
                    "id": "1", "object": "chat.completion", "created": 1, "model": "judge",
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                    "usage": {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40},
                }
            )  # fmt: skip

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_a_score_becomes_a_share(serve: Serve) -> None:
    url, asked = await serve("Good.\nScore: 7.5")
    judge = Judge(base_url=url, model="judge")
    found = await judge("It is 4.", ROW)
    assert (found.value, judge.used_tokens) == (0.75, 40)
    assert "2+2?" in asked[0]["messages"][0]["content"]
    assert "It is 4." in asked[0]["messages"][0]["content"]


async def test_refusals_and_babble_are_retried(serve: Serve) -> None:
    url, asked = await serve(503, "Hmm.", "**Score: 10**")
    found = await Judge(base_url=url, model="judge")("4", ROW)
    assert (found.value, len(asked)) == (1.0, 3)


@pytest.mark.parametrize("reply", ["Score: 11", "Score: -1", "no number", "", "Score: 5\nbut who knows", "Score: nan"])
async def test_no_clear_score_is_no_verdict(serve: Serve, reply: str) -> None:
    url, asked = await serve(reply)
    found = await Judge(base_url=url, model="judge", retries=0)("4", ROW)
    assert (found.value, len(asked), "no score from 0 to 10" in found.info["judge_error"]) == (None, 1, True)


async def test_a_refusal_for_good_is_not_retried(serve: Serve) -> None:
    url, asked = await serve(400)
    found = await Judge(base_url=url, model="judge")("4", ROW)
    assert (found.value, len(asked), "400" in found.info["judge_error"]) == (None, 1, True)


async def test_the_budget_ends_in_no_verdict(serve: Serve) -> None:
    url, asked = await serve("Score: 1")
    judge = Judge(base_url=url, model="judge", budget_tokens=70)
    values = [(await judge("4", ROW)).value for _ in range(4)]
    assert (values, len(asked)) == ([0.1, 0.1, None, None], 2)


async def test_a_server_that_is_not_there_is_no_verdict() -> None:
    found = await Judge(base_url="http://127.0.0.1:9/v1", model="judge", retries=0)("4", ROW)
    assert (found.value, "ConnectorError" in found.info["judge_error"]) == (None, True)


async def test_settings_that_cannot_work(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="highest"):
        Judge(base_url="http://x", model="m", highest=0.0)
    with pytest.raises(ConfigError, match="modle"):
        Judge(base_url="http://x", modle="m")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is empty"):
        await Judge(base_url="http://x", model="m", api_key_env="NO_SUCH_KEY")("4", ROW)
    with pytest.raises(ConfigError, match="lacks"):
        await Judge(base_url="http://x", model="m", prompt="{rubric}")("4", ROW)
