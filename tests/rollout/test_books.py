"""Who may change the books beside whom; and the clock that waits for threads."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.calling import call
from agentrl.errors import RunError
from agentrl.rollout.books import Books
from agentrl.testing.clock import run_virtual


def test_groups_end_side_by_side_and_a_take_sees_none_half_booked() -> None:
    story: list[str] = []

    async def change(name: str, seconds: float = 1.0) -> None:
        story.append(f"{name} begins")
        await asyncio.sleep(seconds)
        story.append(f"{name} ends")

    async def body() -> None:
        books = Books(lambda: None)
        early = [asyncio.create_task(books.share(change(name, took))) for name, took in (("a", 1.0), ("b", 2.0))]
        await asyncio.sleep(0.5)
        take = asyncio.create_task(books.alone(change("take")))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(books.share(change("c")))
        await asyncio.gather(*early, take, late)

    run_virtual(body())
    assert story == ["a begins", "b begins", "a ends", "b ends", "take begins", "take ends", "c begins", "c ends"]


def test_a_change_runs_to_its_end_whoever_waits_for_it_is_cancelled() -> None:
    async def body() -> None:
        books, done = Books(lambda: None), asyncio.Event()

        async def change() -> None:
            await asyncio.sleep(5.0)
            done.set()

        caller = asyncio.create_task(books.alone(change()))
        await asyncio.sleep(1.0)
        caller.cancel()
        await books.share(asyncio.sleep(0.0))
        assert done.is_set()

    run_virtual(body())


def test_the_first_failure_counts_and_keeps_its_cause() -> None:
    async def body() -> None:
        told: list[str] = []
        books = Books(lambda: told.append("told"))

        async def broken() -> None:
            raise ValueError("torn page")

        with pytest.raises(ValueError, match="torn page"):
            await books.share(broken())
        books.fail(RunError("a consequence"))
        with pytest.raises(RunError, match="the books of groups broke: ValueError: torn page") as caught:
            books.check()
        assert isinstance(caught.value.__cause__, ValueError)
        assert told == ["told"]

    run_virtual(body())


def test_virtual_time_stands_still_while_a_plain_function_works() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        timer = asyncio.create_task(asyncio.sleep(100.0))
        await call(time.sleep, 0.05)
        assert loop.time() == 0.0
        await timer
        assert loop.time() == pytest.approx(100.0)

    run_virtual(body())
