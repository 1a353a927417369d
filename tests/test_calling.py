"""Plain functions of one object run in one thread; what hangs costs that thread and no more."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.calling import Caller, call

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


def here() -> int:
    return threading.get_ident()


@pytest.fixture
def lines() -> Callable[[], list[threading.Thread]]:
    """The threads of callers that this test began: other tests may have left some that hang."""
    known = set(threading.enumerate())
    return lambda: [thread for thread in set(threading.enumerate()) - known if thread.name.startswith("env-")]


async def until(condition: Any) -> None:
    """Threads end when they end: wait, at most a minute."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within a minute")


async def test_all_plain_calls_of_a_caller_run_in_one_thread() -> None:
    caller, other = Caller(), Caller()
    threads = {await caller(here) for _ in range(5)}
    assert len(threads) == 1
    assert here() not in threads
    assert await other(here) not in threads

    async def coroutine() -> int:
        return here()

    assert await caller(coroutine) == here(), "a coroutine runs in the loop"
    caller.end()
    other.end()


async def test_what_a_plain_function_does_comes_back() -> None:
    async def later() -> str:
        return "awaited"

    def raises() -> None:
        raise KeyError("gone")

    def stops() -> None:
        raise StopIteration("enough")

    def exits() -> None:
        raise SystemExit(3)

    async def cancelled() -> None:
        raise asyncio.CancelledError("its own")

    PLACE.set("in the episode")
    assert await call(PLACE.get) == "in the episode"
    assert await call(lambda: later()) == "awaited"
    assert await call(dict, a=1) == {"a": 1}
    with pytest.raises(KeyError, match="gone"):
        await call(raises)
    for function, says in (
        (stops, "StopIteration: enough"),
        (exits, "SystemExit: 3"),
        (cancelled, "CancelledError: its own"),
    ):
        with pytest.raises(RuntimeError, match=says):
            await asyncio.wait_for(call(function), 30.0)


async def test_who_is_cancelled_ends_as_cancelled() -> None:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(call(waits))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_that_hangs_leaves_the_caller_usable(lines: Callable[[], list[threading.Thread]]) -> None:
    caller, release = Caller(), threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await caller(release.wait)
    assert await caller(here) != here()
    release.set()
    caller.end()
    await until(lambda: not lines())


async def test_calls_that_overlap_do_not_wait_for_each_other() -> None:
    caller = Caller()
    both = threading.Barrier(2, timeout=60.0)
    await asyncio.gather(caller(both.wait), caller(both.wait))
    caller.end()


async def test_threads_end_with_their_caller(lines: Callable[[], list[threading.Thread]]) -> None:
    caller = Caller()
    await caller(here)
    assert lines()
    del caller
    gc.collect()
    await until(lambda: not lines())
    await call(time.sleep, 0)
    await until(lambda: not lines())
