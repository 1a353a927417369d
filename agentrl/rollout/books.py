"""Changes of the runner's books: which may run side by side, that each runs to its end, what becomes of failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from agentrl.errors import RunError

T = TypeVar("T")


class Books:
    """A lock that changes share or hold alone, and the first failure of any task that was started here.

    Groups that end *share* it, so that their durable writes fall into one transaction; a take, a publish and a resume
    hold it *alone*, because they must not see a group half booked. Whoever waits to hold it alone goes first.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.failed = asyncio.Event()
        self.failure: RunError | None = None
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sharing = 0
        self._alone = False
        self._queue = 0
        self._turn = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether one more change may share it now; what is done before the next `await` is such a change."""
        return not self._alone and not self._queue

    async def share(self, change: Coroutine[Any, Any, T]) -> T:
        """Run `change` beside others that share, to its end even where the caller is cancelled."""
        return await self._run(self.shared(), change)

    async def alone(self, change: Coroutine[Any, Any, T]) -> T:
        """Run `change` with nothing beside it, to its end even where the caller is cancelled."""
        return await self._run(self._exclusive(), change)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold it together with others."""
        await self._until(lambda: self.open)
        self._sharing += 1
        try:
            yield
        finally:
            self._sharing -= 1
            self._turn.set()

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        self._queue += 1
        try:
            await self._until(lambda: not self._alone and not self._sharing)
            self._alone = True
        finally:
            self._queue -= 1
            self._turn.set()
        try:
            yield
        finally:
            self._alone = False
            self._turn.set()

    async def _until(self, free: Callable[[], bool]) -> None:
        while not free():
            self._turn.clear()
            await self._turn.wait()

    async def _run(self, lock: AbstractAsyncContextManager[None], change: Coroutine[Any, Any, T]) -> T:
        async def locked() -> T:
            async with lock:
                return await change

        return await asyncio.shield(self.spawn(self._tasks, locked(), "the books of groups"))

    def spawn(self, among: set[asyncio.Task[Any]], work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A task that is kept in `among` while it runs, and whose failure is the run's."""
        task = asyncio.create_task(work, name=name)
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(self.fail_by)
        return task

    def fail_by(self, task: asyncio.Task[Any]) -> None:
        """Take over the failure of an ended task, where it has one."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, RunError):
            self.fail(error)
        else:
            failure = RunError(f"{task.get_name()} broke: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)

    def fail(self, error: RunError) -> None:
        """The run cannot go on; the first error counts."""
        if self.failure is None:
            self.failure = error
            self.failed.set()
            self._on_failure()

    def check(self) -> None:
        """Raise what ended the run."""
        if self.failure is not None:
            raise self.failure
