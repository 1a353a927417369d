"""The watchdog: silent while things move, explicit when they do not. In virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from agentrl.conductor import watchdog
from agentrl.conductor.watchdog import Wait, Watchdog
from agentrl.errors import RunError
from agentrl.testing.clock import run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def _virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=now))


def test_a_stall_is_told_once_and_then_ends_the_run_with_the_waits() -> None:
    told: list[tuple[float, str]] = []

    async def stalls() -> None:
        dog = Watchdog(60.0, lambda text: told.append((now(), text)))
        dog.probe(lambda: [Wait("trainer rank 0", "a batch", 12.0)])
        dog.beat("group 7 finished")
        with dog.waiting("the publisher", "engine 127.0.0.1:1 to load 1.5"), pytest.raises(RunError) as caught:
            await dog.run()
        assert 120 < now() <= 122
        assert len(told) == 1
        assert 60 < told[0][0] <= 62
        for text in (told[0][1], str(caught.value)):
            assert "trainer rank 0 waits for a batch (12 s)" in text
            assert "the publisher waits for engine 127.0.0.1:1 to load 1.5" in text
            assert "the last thing was: group 7 finished" in text
        assert "monitor.stall_seconds" in str(caught.value)
        assert [w.who for w in dog.waits()] == ["trainer rank 0"], "a wait that is over is not shown"

    run_virtual(stalls())


def test_beats_keep_it_quiet() -> None:
    told: list[str] = []

    async def moves() -> None:
        dog = Watchdog(60.0, told.append)
        task = asyncio.create_task(dog.run())
        for _ in range(12):
            dog.beat("a step")
            await asyncio.sleep(50.0)
        assert not task.done()
        assert told == []
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(moves())


def test_a_conductor_that_stood_still_itself_blames_nobody() -> None:
    """Stopped by hand, or with its machine, and continued: the others had no time either."""
    told: list[str] = []
    stood = [0.0]

    async def stops(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now() + stood[0]))
        dog = Watchdog(60.0, told.append)
        task = asyncio.create_task(dog.run())
        await asyncio.sleep(30.0)
        stood[0] = 3600.0
        await asyncio.sleep(25.0)
        assert not task.done()
        assert told == []
        await asyncio.sleep(10.0)
        assert len(told) == 1, "a stall is one all the same"
        task.cancel()
        await asyncio.wait((task,))

    with pytest.MonkeyPatch.context() as patch:
        run_virtual(stops(patch))
