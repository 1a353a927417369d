"""The durable pool of finished groups: between rollouts that stream and a trainer that takes batches.

An asynchronous face of `ledger.Ledger`: all SQLite work happens in one thread of its own, one call after the other, so
the event loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import orjson
import zstandard

from agentrl.rollout.ledger import Ledger
from agentrl.rollout.records import Ask, Change, Content, State, Stored, TakeRule
from agentrl.types import Group, Version
from agentrl.wire import decode_group, encode_group, json_bytes

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Take:
    """What one step trains on: groups without rows and messages, as bytes. `cursor` goes into the checkpoint unread."""

    id: int
    step: int
    version: Version
    ids: tuple[int, ...]
    bodies: tuple[bytes, ...]
    cursor: Mapping[str, Any]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups; decoded once, about 2 ms for one of 16k tokens."""
        return tuple(decode_group(body) for body in self.bodies)


class Pool:
    """One file, one writer.

    ```python
    pool = await Pool.open(run_dir / "pool.sqlite")
    await pool.resume(Version(pool.incarnation + 1, checkpoint_number), checkpoint_cursor)
    …
    await pool.close()
    ```
    """

    def __init__(self, ledger: Ledger, executor: ThreadPoolExecutor) -> None:
        self._ledger = ledger
        self._executor = executor
        self._queue: list[tuple[Group, asyncio.Future[bool]]] = []
        self._flush: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path, *, keep: int = 0) -> Pool:
        """Open or create the file; RunError where it cannot be written. `keep`: see `Ledger`."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="pool")
        ledger = await asyncio.get_running_loop().run_in_executor(executor, Ledger, path, keep)
        return cls(ledger, executor)

    async def close(self) -> None:
        """Finish what is being written, then close the file."""
        await self._call(self._ledger.close)
        self._executor.shutdown(wait=False)

    async def incarnation(self) -> int:
        """The last incarnation; 0 before the first."""
        return await self._call(lambda: self._ledger.incarnation)

    async def start(self, fingerprint: str) -> int:
        """The position at which the data set with this fingerprint begins, see `Ledger.start`."""
        return await self._call(self._ledger.start, fingerprint)

    async def resume(
        self, version: Version, cursor: Mapping[str, Any] | None = None, running: Collection[int] = ()
    ) -> None:
        """Begin incarnation `version.incarnation` at a checkpoint, or with None at the start; see `Ledger.resume`."""
        await self._call(self._ledger.resume, version, cursor, frozenset(running))

    async def content(self) -> Content:
        """What is live now."""
        return await self._call(self._ledger.content)

    def ask(self, asked: Ask) -> None:
        """The position runs; written with the next change."""
        asyncio.get_running_loop().run_in_executor(self._executor, self._ledger.ask, asked)

    async def put(self, group: Group) -> bool:
        """Store a finished group durably; False where it holds tokens of abandoned weights and is to be asked again."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((group, done))
        if self._flush is None:
            self._flush = asyncio.create_task(self._write_queue())
        return await done

    async def filter(self, group: Group, reason: str) -> bool:
        """A group without signal ends here; False as for `put`."""
        return await self._call(self._ledger.settle, group.id, State.FILTERED, reason, group.versions)

    async def give_up(self, position: int, reason: str) -> None:
        """A failed group ends here."""
        await self._call(self._ledger.settle, position, State.GIVEN_UP, reason)

    async def reask(self, asked: Ask, reason: str, max_asks: int) -> Ask | None:
        """A running group grew too old: the next attempt, or None where it is given up."""
        return await self._call(self._ledger.reask, asked, reason, max_asks)

    async def take(self, step: int, version: Version, rule: TakeRule) -> tuple[Change, Take | None]:
        """The batch of `step`, the same one when asked again; None: not enough groups yet, or some must go first."""
        return await self._call(self._take, step, version, rule)

    async def published(self, version: Version, rule: TakeRule) -> Change:
        """Engines have `version`."""
        return await self._call(self._ledger.published, version, rule)

    async def group_bytes(self, take: int, position: int) -> bytes:
        """`encode_group(group, messages=False)` of a taken group; KeyError where it is not in that take."""
        return await self._call(self._ledger.body, take, position)

    async def group(self, position: int) -> Group:
        """A stored group with its rows and messages, for inspection; KeyError where there is none."""
        return await self._call(lambda: _whole(*self._ledger.chat(position)))

    async def retain(self, cursor: Mapping[str, Any]) -> int:
        """Forget what no checkpoint needs: `cursor` is the oldest retained one's. Returns how many groups went."""
        return await self._call(self._ledger.retain, int(cursor["take"]))

    async def metrics(self) -> dict[str, float]:
        """Counts by state, tokens and bytes stored, the age of the oldest group in seconds."""
        return await self._call(self._ledger.metrics)

    async def _write_queue(self) -> None:
        """Groups that finish while one is being written share the next transaction: a durable write costs a disk's
        latency, whatever it holds."""
        while self._queue:
            batch, self._queue = self._queue, []
            try:
                stored = await self._call(self._put, [group for group, _ in batch])
            except Exception as error:  # handed to those who wait
                stored = []
                for _, done in batch:
                    if not done.cancelled():
                        done.set_exception(error)
            for (_, done), result in zip(batch, stored, strict=False):
                if not done.cancelled():
                    done.set_result(result)
        self._flush = None

    def _put(self, groups: Sequence[Group]) -> list[bool]:
        # Encoded in the same call: about a millisecond each, and every change of threads costs as much on busy cores.
        return self._ledger.put([_stored(group) for group in groups])

    def _take(self, step: int, version: Version, rule: TakeRule) -> tuple[Change, Take | None]:
        change = self._ledger.take(step, version, rule)
        record = change.take
        if record is None:
            return change, None
        bodies = tuple(self._ledger.body(record.id, position) for position in record.positions)
        return change, Take(record.id, step, record.version, record.positions, bodies, record.cursor)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))


def _stored(group: Group) -> Stored:
    chat = [{"row": dict(e.row), "messages": list(e.messages)} for e in group.episodes]
    return Stored(
        position=group.id,
        attempt=group.attempt,
        labels=tuple(group.versions),
        body=encode_group(group, messages=False),
        chat=zstandard.compress(json_bytes(chat), 1),
        tokens=sum(len(t) for e in group.episodes for t in e.trajectories),
    )


def _whole(body: bytes, chat: bytes) -> Group:
    group, told = decode_group(body), orjson.loads(zstandard.decompress(chat))
    episodes = tuple(
        replace(episode, row=told[i]["row"], messages=tuple(told[i]["messages"]))
        for i, episode in enumerate(group.episodes)
    )
    return replace(group, episodes=episodes)
