"""Calls user code: a coroutine function in the event loop, a plain function in a thread, because it may block."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any


class Caller:
    """Calls the functions of one object; the plain ones all in one thread of its own.

    ```python
    caller = Caller()
    messages, info = await caller(env.reset, seed=7)    # `def` or `async def`
    caller.end()
    ```

    What ends a program (`sys.exit`) or a task, raised by the function itself, is its error: a RuntimeError.

    One thread, because many libraries (SQLite, renderers, simulators) want to be used from the thread that opened
    them. A call that hangs or that overlaps with another one costs a thread: the next call gets a new one. Threads are
    daemons, so code that never returns does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._line: _Line | None = None

    async def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's result. Cancelled, a plain function goes on in its thread and its result is dropped."""
        try:
            return await self._called(function, *args, **kwargs)
        except (SystemExit, asyncio.CancelledError) as error:
            if asked_to_stop(error):
                raise
            raise _as_error(error) from error

    async def _called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        if self._line is None or self._line.busy:
            self.end()
            self._line = _Line()
        result = await self._line.run(lambda: function(*args, **kwargs))
        return await result if inspect.isawaitable(result) else result

    def end(self) -> None:
        """Let the thread go; a later call gets a new one."""
        if self._line is not None:
            self._line.end()
            self._line = None

    def __del__(self) -> None:
        self.end()


def asked_to_stop(error: BaseException) -> bool:
    """Whether this task is being cancelled; otherwise the code that was called raised `error` by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _as_error(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One call, without a thread that stays."""
    caller = Caller()
    try:
        return await caller(function, *args, **kwargs)
    finally:
        caller.end()


class _Line:
    """One thread and the work that waits for it."""

    def __init__(self) -> None:
        self.busy = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._work,), daemon=True, name=f"env-{id(self):x}").start()

    async def run(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()
        self.busy = True

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            try:
                outcome: tuple[Any, BaseException | None] = (context.run(function), None)
            except Exception as error:
                # A future cannot carry a StopIteration.
                outcome = (None, _as_error(error) if isinstance(error, StopIteration) else error)
            except BaseException as error:  # of this thread alone: whoever waits must be told
                outcome = (None, _as_error(error))
            self.busy = False
            try:
                loop.call_soon_threadsafe(settle, *outcome)
            except RuntimeError:
                pass  # the loop is closed: nobody waits for this any more

        self._work.put(work)
        return await future

    def end(self) -> None:
        self._work.put(None)


def _serve(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    # A function and not a method: the thread must not keep its line, and so its caller, alive.
    while (work := waiting.get()) is not None:
        work()
        del work
