"""How long a call outlives its clients."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agentrl.endpoint.replay import Replays, Running
from agentrl.testing.clock import run_virtual


async def _endless() -> Any:
    await asyncio.Event().wait()


def _start() -> Running:
    return Running(_endless())


def test_every_client_that_goes_leaves_the_whole_grace() -> None:
    async def play() -> list[bool]:
        replays, alive = Replays(2.0), []
        with replays.hold(b"call", False, _start) as first:
            pass
        await asyncio.sleep(1.9)
        with replays.hold(b"call", True, _start) as again:
            assert again is first
        for seconds in (1.9, 0.2):
            await asyncio.sleep(seconds)
            alive.append(not first.task.done())
        return alive

    assert run_virtual(play()) == [True, False]


async def test_a_retry_that_comes_while_the_process_stands_still_finds_its_call() -> None:
    loop, stood = asyncio.get_running_loop(), 0.0
    loop.time = lambda: time.monotonic() + stood  # type: ignore[method-assign]
    replays = Replays(60.0)
    with replays.hold(b"call", False, _start) as first:
        await asyncio.sleep(0)
    stood = 90.0
    for _ in range(3):
        await asyncio.sleep(0)  # what came meanwhile is read a few rounds later
    with replays.hold(b"call", True, _start) as again:
        assert again is first
        assert not first.task.done()
    await replays.close()
    assert first.task.cancelled()
