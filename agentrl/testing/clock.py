"""Virtual time: an asyncio loop whose clock jumps to the next timer, so that hours of waiting run in milliseconds.

Deterministic, and a deadlock (nothing ready, no timer) raises instead of hanging. For code that waits through asyncio
alone: work for an executor is done at once, on the loop, and takes no virtual time; real sockets and threads have no
place here.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and moves only when every task waits for it to."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

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
    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._jump(timeout)
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
