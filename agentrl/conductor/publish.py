"""Puts new weights into the engines while rollouts go on, and keeps the disk clean of old ones."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from agentrl.conductor.feed import WeightsReady
from agentrl.errors import EngineError, RunError
from agentrl.types import Version

Report = TypeVar("Report")


class WeightsLost(EngineError):
    """The weights are gone with the trainer that made them: they are passed over, and the engines keep theirs."""


ATTEMPTS = 3


class Published(NamedTuple, Generic[Report]):
    """One publish that the engines confirmed. `skipped` counts versions that a newer one overtook while waiting."""

    version: Version
    path: Path
    step: int
    seconds: float
    skipped: int
    report: Report


class Publisher(Generic[Report]):
    """One publish at a time; where several versions wait, only the newest goes out.

    A publish that fails leaves the engines on the version they had, and is tried again: rollouts go on meanwhile.
    """

    def __init__(
        self,
        publish: Callable[[Path, Version], Awaitable[Report]],
        on_published: Callable[[Published[Report]], Awaitable[None]],
        note: Callable[[str], None],
        *,
        owned: Path,
        retry_after: float = 1.0,
    ) -> None:
        self._publish = publish
        self._on_published = on_published
        self._note = note
        self._owned = owned
        self._retry_after = retry_after
        self._busy = asyncio.Lock()
        self._pending: WeightsReady | None = None
        self._skipped = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.current: Path | None = None
        """The folder the engines were last loaded from; it stays until the next one is in."""

    def offer(self, ready: WeightsReady) -> None:
        """New weights are on disk. Saying so twice, as over a connection that broke, does no harm."""
        if self._pending is not None and self._pending.path != ready.path:
            self._skipped += 1
            self._remove(Path(self._pending.path))
        self._pending = ready
        self._idle.clear()
        self._wake.set()

    async def force(self, path: Path, version: Version) -> None:
        """Go back to the weights in `path`, whatever waits: those weights are abandoned. Tells nobody."""
        async with self._busy:
            if self._pending is not None:
                self._remove(Path(self._pending.path))
                self._pending, self._skipped = None, 0
            await self._put(path, version)
            self._replace(path)

    async def drained(self, deadline: float) -> bool:
        """Wait up to `deadline` seconds until everything offered is out; whether it is."""
        try:
            await asyncio.wait_for(self._idle.wait(), deadline)
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Publish what is offered, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending is not None:
                async with self._busy:
                    if (ready := self._pending) is not None:
                        skipped, self._pending, self._skipped = self._skipped, None, 0
                        await self._one(ready, skipped)
            self._idle.set()

    async def _one(self, ready: WeightsReady, skipped: int) -> None:
        path, version = Path(ready.path), Version.parse(ready.version)
        begin = time.monotonic()
        report = await self._put(path, version)
        if report is None:
            self._skipped += skipped + 1
            self._remove(path)
            return
        await self._on_published(Published(version, path, ready.step, time.monotonic() - begin, skipped, report))
        self._replace(path)

    async def _put(self, path: Path, version: Version) -> Report | None:
        """The engines' report; None where the weights are lost, or were refused and newer ones wait."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._publish(path, version)
            except WeightsLost as error:
                self._note(f"weights {version} are passed over: {error}")
                return None
            except EngineError as error:
                self._note(
                    f"publish of {version} failed ({attempt} of {ATTEMPTS}), engines keep their weights: {error}"
                )
                if self._pending is not None:
                    return None
                if attempt == ATTEMPTS:
                    raise RunError(
                        f"the engines refused version {version} at {path} {ATTEMPTS} times, last: {error}; "
                        "see logs/engine-*.log"
                    ) from error
                await asyncio.sleep(self._retry_after)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _replace(self, path: Path) -> None:
        old, self.current = self.current, path
        if old is not None and old != path:
            self._remove(old)

    def _remove(self, path: Path) -> None:
        """Only what the trainer made for us: a checkpoint's folder is not ours to delete."""
        if path.is_relative_to(self._owned):
            shutil.rmtree(path, ignore_errors=True)
