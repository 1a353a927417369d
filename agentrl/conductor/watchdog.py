"""Nothing waits in silence: every wait has a name and a deadline, and a stall says who waits for what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from agentrl.errors import RunError


class Wait(NamedTuple):
    """Somebody has waited for something for so many seconds."""

    who: str
    what: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.who} waits for {self.what} ({self.seconds:.0f} s)"


Probe = Callable[[], Sequence[Wait]]
STOOD_SECONDS = 1.0


class Standstill:
    """Notices that this process itself stood still: stopped by hand, or with its whole machine.

    Nobody could be heard meanwhile, so nobody's silence counts over that time.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()

    def seconds(self, expected: float) -> float:
        """How much longer than `expected` the last call is ago, 0.0 where that is not worth mentioning."""
        now = time.monotonic()
        beyond, self._last = now - self._last - expected, now
        return beyond if beyond > STOOD_SECONDS else 0.0


class Watchdog:
    """Collects the waits of the run and notices when nothing has moved for too long.

    `beat` says that something moved: a finished group, a step, a publish. After `patience` seconds without a beat the
    waits are reported through `report`; after twice that the run ends with them as the reason.
    """

    def __init__(self, patience: float, report: Callable[[str], None]) -> None:
        self.patience = patience
        self._report = report
        self._probes: list[Probe] = []
        self._open: dict[int, tuple[str, str, float]] = {}
        self._last = time.monotonic()
        self._last_what = "start"

    def probe(self, probe: Probe) -> None:
        """Ask this, too, for waits."""
        self._probes.append(probe)

    def beat(self, what: str) -> None:
        """Something moved."""
        self._last, self._last_what = time.monotonic(), what

    @contextmanager
    def waiting(self, who: str, what: str) -> Iterator[None]:
        """Show this wait while the block runs."""
        key = id(wait := (who, what, time.monotonic()))
        self._open[key] = wait
        try:
            yield
        finally:
            del self._open[key]

    def waits(self) -> list[Wait]:
        """All present waits, longest first."""
        now = time.monotonic()
        found = [Wait(who, what, now - since) for who, what, since in self._open.values()]
        for probe in self._probes:
            found += probe()
        return sorted(found, key=lambda w: -w.seconds)

    def explain(self) -> str:
        """The stall in words."""
        idle = time.monotonic() - self._last
        waits = "\n".join(f"  {wait}" for wait in self.waits()) or "  (nobody says that they wait)"
        return f"nothing has moved for {idle:.0f} s; the last thing was: {self._last_what}\n{waits}"

    async def run(self) -> None:
        """Watch until cancelled; raises RunError when the stall has lasted twice the patience."""
        told = False
        tick = min(1.0, self.patience / 4)
        while True:
            standstill = Standstill()
            await asyncio.sleep(tick)
            self._last = min(self._last + standstill.seconds(tick), time.monotonic())
            idle = time.monotonic() - self._last
            if idle > 2 * self.patience:
                raise RunError(f"the run stalled: {self.explain()}\nraise monitor.stall_seconds if a step is that slow")
            if idle > self.patience and not told:
                self._report(self.explain())
            told = idle > self.patience
