"""One engine's place in a router: whether it serves, and calls that a lost engine does not hold up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.engine.client import EngineClient
from agentrl.errors import DeadlineExceeded, EngineError, EngineLost

Answer = TypeVar("Answer")


@dataclass(eq=False)
class Seat:
    """An engine, and whether it may be given requests."""

    client: EngineClient
    fenced: str = ""
    """Why it serves nothing; empty while it serves."""
    leaves: bool = False
    """Whether it is being taken out: it does not come back."""
    misses: int = 0
    sessions: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    catching_up: asyncio.Task[None] | None = None

    def fence(self, reason: str) -> None:
        """Give it nothing more; whoever waits for it waits no longer."""
        self.fenced = reason
        self.lost.set()

    def serve(self) -> None:
        """Let it have requests."""
        self.fenced, self.misses, self.lost = "", 0, asyncio.Event()


async def while_it_serves(seat: Seat, question: Coroutine[Any, Any, Answer]) -> Answer | None:
    """What an engine that serves answers; None where it is fenced meanwhile: it may never answer."""
    asked = asyncio.ensure_future(question)
    lost = asyncio.ensure_future(seat.lost.wait())
    try:
        await asyncio.wait((asked, lost), return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        asked.cancel()
        lost.cancel()
        await asyncio.wait((asked, lost))


@asynccontextmanager
async def within(seconds: float | None, what: str) -> AsyncIterator[None]:
    """DeadlineExceeded, naming `what`, where the body takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s") from error


def same(ours: dict[str, str], theirs: dict[str, str], otherwise: str) -> None:
    """EngineError where two engines hold different weights."""
    if ours != theirs:
        wrong = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise EngineError(f"{otherwise}: {wrong[:3]}")


async def each(
    seats: Sequence[Seat],
    call: Callable[[Seat], Awaitable[None]],
    failures: dict[Seat, BaseException],
    seconds: float | None = None,
) -> None:
    """Call every seat at once; an infrastructure fault is noted for its seat, the first one counts.

    One that takes longer than `seconds`, or is fenced meanwhile, has failed and is waited for no longer.
    """

    async def one(seat: Seat) -> None:
        work = asyncio.ensure_future(call(seat))
        lost = asyncio.ensure_future(seat.lost.wait())
        try:
            await asyncio.wait((work, lost), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif lost.done():
                raise EngineLost(f"{seat.client.url} was fenced meanwhile: {seat.fenced}")
            else:
                raise DeadlineExceeded(f"{seat.client.url} took longer than {seconds:g} s: the others go on without it")
        except (EngineError, DeadlineExceeded) as error:
            failures.setdefault(seat, error)
        finally:
            lost.cancel()
            work.cancel()
            await asyncio.wait((work, lost))

    await asyncio.gather(*(one(seat) for seat in seats))
