"""A rollout process's way to the engines: it asks those that the conductor names, and changes nothing about them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from agentrl.engine.client import EngineClient
from agentrl.engine.failover import go_on_until
from agentrl.engine.reply import Progress
from agentrl.engine.types import Completion, GenerateRequest, OnTokens
from agentrl.errors import DeadlineExceeded, EngineError, EngineLost

_SESSIONS = 100_000
_MAX_LOSSES = 3
_SUSPECT_SECONDS = 1.0


class _Seat:
    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.sessions = 0
        self.suspect_until = 0.0
        self.left = asyncio.Event()


class FollowedEngines:
    """An `Engine` over the engines of `follow`: sticky by session, the least busy one first.

    A request whose engine is lost, or named no longer, goes on at another from the tokens so far.
    """

    def __init__(self, make_client: Callable[[str], EngineClient]) -> None:
        self._make_client = make_client
        self._seats: dict[str, _Seat] = {}
        self._sessions: OrderedDict[str, _Seat] = OrderedDict()
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, urls: Sequence[str]) -> None:
        """These serve now."""
        gone = [self._seats.pop(url) for url in list(self._seats) if url not in urls]
        for url in urls:
            if url not in self._seats:
                self._seats[url] = _Seat(self._make_client(url))
        for seat in gone:
            seat.left.set()
            # Beside: its requests are aborted first, which an engine whose link is cut never answers.
            closing = asyncio.create_task(_close(seat.client))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._changed.set()

    async def close(self) -> None:
        """Close the connections."""
        self.follow(())
        await asyncio.gather(*self._closing)

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See `Engine.generate`."""
        progress: Progress | None = None
        while True:
            seat = await self._seat(request)
            progress = progress or seat.client.begin(request)
            try:
                return await self._run(seat, progress, on_tokens)
            except EngineLost as error:
                seat.suspect_until = asyncio.get_running_loop().time() + _SUSPECT_SECONDS
                if progress.losses >= _MAX_LOSSES:
                    raise EngineError(
                        f"request {request.id} lost {progress.losses} engines in a row and may be the cause: {error}"
                    ) from error

    async def _run(self, seat: _Seat, progress: Progress, on_tokens: OnTokens | None) -> Completion:
        guarded = len(self._seats) > 1
        done = await go_on_until(seat.left, seat.client, progress, on_tokens, guarded=guarded)
        if done is not None:
            return done
        progress.losses += 1
        raise EngineLost(f"{seat.client.url} serves no longer")

    async def _seat(self, request: GenerateRequest) -> _Seat:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            seat = self._sessions.get(request.session)
            if seat is not None and not seat.left.is_set() and now >= seat.suspect_until:
                self._sessions.move_to_end(request.session)
                return seat
            serving = [s for s in self._seats.values() if now >= s.suspect_until]
            if serving:
                return self._assign(request.session, min(serving, key=lambda s: (s.client.in_flight, s.sessions)))
            if now >= request.deadline:
                raise DeadlineExceeded(
                    f"request {request.id}: no engine served until the deadline ({len(self._seats)} are known)"
                )
            self._changed.clear()
            try:
                async with asyncio.timeout_at(min(request.deadline, now + _SUSPECT_SECONDS)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _assign(self, session: str, seat: _Seat) -> _Seat:
        if (before := self._sessions.pop(session, None)) is not None:
            before.sessions -= 1
        self._sessions[session] = seat
        seat.sessions += 1
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)[1].sessions -= 1
        return seat


async def _close(client: EngineClient) -> None:
    """Once its requests have gone elsewhere: what they say last would open a connection again."""
    while client.in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await client.close()
