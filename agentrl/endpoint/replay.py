"""One result for one call, however often its client repeats it; a client that is gone ends its call."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from agentrl.endpoint.reply import Reply
from agentrl.errors import LimitReached

_KEPT = 8
_LATE = 0.1
"""A process that comes so late to what it meant to do stood still, and has yet to read what came meanwhile."""


class Running:
    """A call under way, for any number of clients that wait for it. It is a task of its own.

    `answering` says that a client has already been sent a part of the answer, so that none will ask again.
    """

    def __init__(self, call: Coroutine[Any, Any, Reply]) -> None:
        self.task = asyncio.ensure_future(call)
        self.waiting = 0
        self.answering = False
        self._end: asyncio.TimerHandle | None = None
        self.task.add_done_callback(_retrieve)

    def wait(self) -> None:
        """One more client waits."""
        self.waiting += 1
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def leave(self, grace: float) -> None:
        """A client is gone. `grace` seconds after the last one the call is cancelled, if none comes."""
        self.waiting -= 1
        if not self.waiting and not self.task.done():
            loop = asyncio.get_running_loop()
            end = loop.time() + grace
            self._end = loop.call_at(end, self._abandon, end, grace)

    def _abandon(self, end: float, grace: float) -> None:
        loop, self._end = asyncio.get_running_loop(), None
        if grace and loop.time() > end + _LATE:
            end = loop.time() + grace
            self._end = loop.call_at(end, self._abandon, end, grace)
        else:
            self.task.cancel()

    async def result(self) -> Reply:
        """The answer. LimitReached where the session was closed meanwhile; cancelling this leaves the call alone."""
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError as error:
            mine = asyncio.current_task()
            if self.task.cancelled() and mine is not None and not mine.cancelling():
                raise LimitReached("the session was closed while this call ran: its episode is over") from error
            raise


class Replays:
    """The latest calls of a session, by body or idempotency key.

    When its last client disconnects, a call lives on for `grace` seconds, in which the client's retry finds it, and is
    then cancelled. Failed calls are not kept, so a retry after an error asks again.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._entries: OrderedDict[bytes, Running] = OrderedDict()
        self._tasks: set[asyncio.Task[Reply]] = set()  # the same body may be asked twice at once

    @contextmanager
    def hold(self, name: bytes, again: bool, start: Callable[[], Running]) -> Iterator[Running]:
        """The call that `start` starts, or the earlier one of that name where this is `again` the same."""
        key = blake2b(name, digest_size=16).digest()
        running = self._entries.get(key) if again else None
        if running is None:
            running = self._keep(key, start())
        running.wait()
        try:
            yield running
        finally:
            running.leave(0.0 if running.answering else self._grace)

    async def close(self) -> None:
        """Cancel what still runs."""
        running = list(self._tasks)
        self._entries.clear()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=5.0)

    def _keep(self, key: bytes, running: Running) -> Running:
        self._tasks.add(running.task)
        running.task.add_done_callback(lambda task: self._finished(key, running))
        self._entries[key] = running
        self._entries.move_to_end(key)
        finished = [k for k, e in self._entries.items() if e.task.done()]
        for old in finished[: max(0, len(self._entries) - _KEPT)]:
            del self._entries[old]
        return running

    def _finished(self, key: bytes, running: Running) -> None:
        self._tasks.discard(running.task)
        failed = running.task.cancelled() or running.task.exception() is not None
        if failed and self._entries.get(key) is running:
            del self._entries[key]


def _retrieve(task: asyncio.Task[Reply]) -> None:
    # A call may fail when nobody waits any more; asyncio would complain.
    if not task.cancelled():
        task.exception()
