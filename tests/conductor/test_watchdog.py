"""The watchdog: silent while things move, explicit when they do not."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.conductor.watchdog import Wait, Watchdog
from agentrl.errors import RunError


async def test_a_stall_is_told_once_and_then_ends_the_run_with_the_waits() -> None:
    told: list[str] = []
    dog = Watchdog(0.2, told.append)
    dog.probe(lambda: [Wait("trainer rank 0", "a batch", 12.0)])
    dog.beat("group 7 finished")
    with dog.waiting("the publisher", "engine 127.0.0.1:1 to load 1.5"), pytest.raises(RunError) as caught:
        await asyncio.wait_for(dog.run(), 5)
    assert len(told) == 1
    for text in (told[0], str(caught.value)):
        assert "trainer rank 0 waits for a batch (12 s)" in text
        assert "the publisher waits for engine 127.0.0.1:1 to load 1.5" in text
        assert "the last thing was: group 7 finished" in text
    assert "monitor.stall_seconds" in str(caught.value)
    assert [w.who for w in dog.waits()] == ["trainer rank 0"], "a wait that is over is not shown"


async def test_beats_keep_it_quiet() -> None:
    told: list[str] = []
    dog = Watchdog(0.2, told.append)
    task = asyncio.create_task(dog.run())
    for _ in range(12):
        dog.beat("a step")
        await asyncio.sleep(0.05)
    assert not task.done()
    assert told == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
