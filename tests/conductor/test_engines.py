"""The run's engine servers, as the conductor asks them."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from agentrl.conductor import engines
from agentrl.conductor.engines import counters_of
from agentrl.engine.client import EngineClient


@pytest.mark.parametrize("answers", [True, False])
async def test_engines_are_asked_together_and_those_that_do_not_answer_are_left_out(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answers when the last has been asked, or nobody ever does."""
    monkeypatch.setattr(engines, "COUNTERS_SECONDS", 60.0 if answers else 0.2)
    asked = 0
    all_asked = asyncio.Event()

    async def counters(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 8 and answers:
            all_asked.set()
        await all_asked.wait()
        return web.json_response({"tokens": 7})

    app = web.Application()
    app.router.add_get("/server_info", counters)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    clients = [EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}") for _ in range(8)]
    assert await counters_of(clients) == ([{"tokens": 7}] * 8 if answers else [])
    for client in clients:
        await client.close()
    await runner.cleanup()
