"""Virtual time: an asyncio loop whose clock jumps to the next timer, so that hours of waiting run in milliseconds.

Deterministic whatever the machine is doing: work for an executor is done at once, on the loop, and takes no virtual
time; the clock stands still while a thread that was started under the loop (a plain function of an environment) still
works. A deadlock (nothing ready, no timer, no thread) raises instead of hanging. Real sockets have no place here.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


THREAD_SECONDS = 20.0
"""Real seconds that a thread may take before the clock gives up on it."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and moves only when every task waits for it to."""

    def __init__(self) -> None:
        self._now = 0.0
        self._others = set(threading.enumerate())
        super().__init__(_JumpingSelector(self._jump, self._working))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _working(self) -> bool:
        return any(thread not in self._others for thread in threading.enumerate())

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self)))
            raise RuntimeError(f"deadlock at {self._now} s: nothing is ready and no timer is set; tasks: {waiting}")
        self._now += timeout

    def run_in_executor(  # type: ignore[override]  # the same contract, run at once
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run `func` now; its result is in the future."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float | None], None], working: Callable[[], bool]) -> None:
        super().__init__()
        self._jump = jump
        self._working = working

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            ready = self._wait_for_threads()
        if not ready and (timeout is None or timeout > 0):
            self._jump(timeout)
        return ready

    def _wait_for_threads(self) -> list[tuple[selectors.SelectorKey, int]]:
        until = time.monotonic() + THREAD_SECONDS
        while self._working():
            if ready := super().select(0.01):  # its `call_soon_threadsafe` wakes the loop
                return ready
            if time.monotonic() > until:
                names = sorted(thread.name for thread in threading.enumerate())
                raise RuntimeError(f"a thread has worked for {THREAD_SECONDS:.0f} real seconds: {names}")
        return super().select(0)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
