"""One result for one call, however often its client repeats it; a client that is gone ends its call."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from agentrl.endpoint.reply import Reply
from agentrl.errors import LimitReached

_KEPT = 8


@dataclass(slots=True, eq=False)
class _Entry:
    task: asyncio.Task[Reply]
    waiting: int = 0


class Replays:
    """The latest calls of a session, by body or idempotency key.

    A call is a task of its own: when its client disconnects it lives on for `grace` seconds, in which the client's
    retry finds it, and is then cancelled. Failed calls are not kept, so a retry after an error asks again.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    async def run(self, name: bytes, again: bool, call: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply:
        """The result of `call`, or of the earlier call of that name where this is `again` the same."""
        key = blake2b(name, digest_size=16).digest()
        entry = self._entries.get(key) if again else None
        if entry is None:
            entry = self._start(key, call)
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        except asyncio.CancelledError as error:
            mine = asyncio.current_task()
            if entry.task.cancelled() and mine is not None and not mine.cancelling():
                raise LimitReached("the session was closed while this call ran: its episode is over") from error
            raise
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.task.done():
                asyncio.get_running_loop().call_later(self._grace, self._abandon, entry)

    async def close(self) -> None:
        """Cancel what still runs."""
        running = [entry.task for entry in self._entries.values() if not entry.task.done()]
        self._entries.clear()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=5.0)

    def _start(self, key: bytes, call: Callable[[], Coroutine[Any, Any, Reply]]) -> _Entry:
        entry = _Entry(asyncio.ensure_future(call()))
        entry.task.add_done_callback(lambda task: self._finished(key, entry))
        self._entries[key] = entry
        self._entries.move_to_end(key)
        finished = [k for k, e in self._entries.items() if e.task.done()]
        for old in finished[: max(0, len(self._entries) - _KEPT)]:
            del self._entries[old]
        return entry

    def _finished(self, key: bytes, entry: _Entry) -> None:
        failed = entry.task.cancelled() or entry.task.exception() is not None
        if failed and self._entries.get(key) is entry:
            del self._entries[key]

    @staticmethod
    def _abandon(entry: _Entry) -> None:
        if not entry.waiting:
            entry.task.cancel()
