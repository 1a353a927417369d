"""The pool of warm boxes: a fair line in front, a clean box for each user, nothing left behind."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from agentrl.config import resolve_object
from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandbox.census import Standing, census
from agentrl.sandbox.link import ServerBox
from agentrl.sandbox.options import SandboxOptions

KINDS = ("bubblewrap", "docker", "subprocess")


class Backend(Protocol):
    """One kind of box. A new kind is a class with these two methods, made from the options."""

    async def start(self, slot: int) -> ServerBox:
        """A booted box; `slot` is one of range(options.slots) and no other living box has it."""
        ...

    async def close(self) -> None:
        """After the last box was closed."""
        ...


class Pool:
    """See `SandboxPool`. A box whose user hit a limit, or that cannot be cleaned, is replaced by a new one."""

    def __init__(self, options: SandboxOptions, backend: Backend) -> None:
        self.options = options
        self._backend = backend
        self._turns = asyncio.Semaphore(options.slots)
        self._free = list(range(options.slots))
        self._idle: list[tuple[int, ServerBox]] = []
        self._returns: set[asyncio.Task[None]] = set()
        self._closed = False
        self._waiting = self._starting = 0
        self._tally = census().enter(self)

    @property
    def kind(self) -> str:
        """Which kind of box."""
        return self.options.kind

    def standing(self) -> Standing:
        """Where the pool stands now."""
        idle, slots = len(self._idle), self.options.slots
        busy = slots - len(self._free) - idle - self._starting
        return Standing(slots, self._waiting, self._starting, busy, idle)

    @asynccontextmanager
    async def box(self) -> AsyncIterator[ServerBox]:
        """A clean box for one user."""
        asked = time.monotonic()
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            slot, box = await self._take()
        except BaseException:
            self._turns.release()
            raise
        self._tally.served(time.monotonic() - asked)
        try:
            yield box
        finally:
            back = asyncio.create_task(self._give_back(slot, box))
            self._returns.add(back)
            back.add_done_callback(self._returns.discard)
            await asyncio.shield(back)

    async def warm(self, count: int | None = None) -> None:
        """Start boxes ahead, all of them or `count`; raises what the first failing one raised."""
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(self._free), self.options.slots if count is None else count)):
                group.create_task(self._warm_one(self._free.pop()))

    async def close(self) -> None:
        """Remove every box that is not in use; boxes in use go when their users are done."""
        self._closed = True
        while self._returns:
            await asyncio.wait(set(self._returns))
        idle, self._idle = self._idle, []
        await asyncio.gather(*(box.close() for _, box in idle))
        await self._backend.close()
        census().leave(self)

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _take(self) -> tuple[int, ServerBox]:
        if self._closed:
            raise SandboxLost("the pool of sandboxes is closed: open another with open_sandbox")
        if self._idle:
            return self._idle.pop()
        slot = self._free.pop()
        return slot, await self._start(slot)

    async def _warm_one(self, slot: int) -> None:
        self._idle.append((slot, await self._start(slot)))

    async def _start(self, slot: int) -> ServerBox:
        self._starting += 1
        try:
            box = await self._backend.start(slot)
        except BaseException as error:
            self._free.append(slot)
            self._tally.failures += isinstance(error, Exception)
            raise
        finally:
            self._starting -= 1
        self._tally.starts += 1
        box.on_program = self._tally.program
        return box

    async def _give_back(self, slot: int, box: ServerBox) -> None:
        try:
            gone = box.lost and not box.closed
            if not self._closed and await self._clean(box):
                self._idle.append((slot, box))
                return
            self._tally.lost += gone
            self._tally.replaced += not self._closed
            try:
                await box.close()
            finally:
                self._free.append(slot)
        finally:
            self._turns.release()

    async def _clean(self, box: ServerBox) -> bool:
        try:
            return await box.reset()
        except SandboxLost:
            return False


def open_sandbox(options: SandboxOptions) -> Pool:
    """The pool of `options.kind`. Use it as `async with open_sandbox(options) as pool, pool.box() as box`.

    The first use builds the root file system or image (2–15 s) and blocks: call it through `asyncio.to_thread` where a
    loop must go on. Raises ConfigError where this machine cannot offer the kind, with the remedy.
    """
    made: Callable[[SandboxOptions], Any] | Any
    if options.kind in KINDS:
        made = importlib.import_module(f"agentrl.sandboxes.{options.kind}").Boxes
    elif ":" in options.kind:
        made = resolve_object(options.kind)
    else:
        raise ConfigError(
            f'sandbox kind {options.kind!r}: expected one of {", ".join(KINDS)}, or "package.module:Class"'
        )
    return Pool(options, made(options))
