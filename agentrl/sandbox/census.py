"""What the sandboxes of this process do, counted where they live: the `agentrl_sandbox_…` of /metrics.

Figures carry the names and labels of OpenMetrics samples (`sandbox_boxes{kind="docker",state="idle"}`), so that those
of several processes are added up name by name.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

Figures = dict[str, float]

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of a program's seconds."""
ENDS = ("ok", "failed", "timeout", "oom", "output", "lost", "cancelled")
"""How a program ended: by itself with code 0, or another; at one of three limits; with its box; with its caller."""
_COUNTS = ("_total", "_bucket", "_sum", "_count")


class Tally:
    """One kind of box: what happened since the process started."""

    def __init__(self) -> None:
        self.starts = 0
        self.failures = 0
        self.lost = 0
        """Boxes that were gone before their user was done."""
        self.replaced = 0
        """Boxes that their user's program left in no state for the next one, lost ones among them."""
        self.users = 0
        self.wait_seconds = 0.0
        self.programs = Counter(dict.fromkeys(ENDS, 0))
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS) + 1)

    def program(self, end: str, seconds: float) -> None:
        """A program ended, after so many seconds in the box."""
        self.programs[end] += 1
        self._seconds += seconds
        self._buckets[bisect_left(BOUNDS, seconds)] += 1

    def served(self, seconds: float) -> None:
        """A user has a box, after so many seconds in the line."""
        self.users += 1
        self.wait_seconds += seconds

    def figures(self, kind: str) -> Figures:
        """All counters, as samples."""
        label = f'kind="{kind}"'
        found: Figures = {
            f"sandbox_starts_total{{{label}}}": self.starts,
            f"sandbox_start_failures_total{{{label}}}": self.failures,
            f"sandbox_boxes_lost_total{{{label}}}": self.lost,
            f"sandbox_boxes_replaced_total{{{label}}}": self.replaced,
            f"sandbox_wait_seconds_count{{{label}}}": self.users,
            f"sandbox_wait_seconds_sum{{{label}}}": self.wait_seconds,
            f"sandbox_program_seconds_count{{{label}}}": self.programs.total(),
            f"sandbox_program_seconds_sum{{{label}}}": self._seconds,
        }
        for end, count in self.programs.items():
            found[f'sandbox_programs_total{{{label},end="{end}"}}'] = count
        below = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._buckets, strict=True):
            below += count
            found[f'sandbox_program_seconds_bucket{{{label},le="{bound}"}}'] = below
        return found


class Standing(NamedTuple):
    """A pool now: boxes that it may have, users in the line, boxes by what they do."""

    slots: int = 0
    waiting: int = 0
    starting: int = 0
    busy: int = 0
    idle: int = 0

    def figures(self, kind: str) -> Figures:
        """As samples."""
        states = {"starting": self.starting, "busy": self.busy, "idle": self.idle}
        found: Figures = {f'sandbox_boxes{{kind="{kind}",state="{state}"}}': n for state, n in states.items()}
        return found | {
            f'sandbox_slots{{kind="{kind}"}}': self.slots,
            f'sandbox_waiting{{kind="{kind}"}}': self.waiting,
        }


class Counted(Protocol):
    """A pool of boxes, as the census sees it."""

    @property
    def kind(self) -> str:
        """Which kind of box."""
        ...

    def standing(self) -> Standing:
        """Where it stands now."""
        ...


class Census:
    """All pools of a process: a tally for each kind of box, and the pools that are open."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._pools: weakref.WeakSet[Counted] = weakref.WeakSet()

    def enter(self, pool: Counted) -> Tally:
        """A pool opens; where its boxes are counted. It leaves by itself when nobody holds it any more."""
        self._pools.add(pool)
        return self._tallies.setdefault(pool.kind, Tally())

    def leave(self, pool: Counted) -> None:
        """A pool is closed: what its boxes did stays counted."""
        self._pools.discard(pool)

    def figures(self) -> Figures:
        """Everything; empty where no pool was ever opened."""
        counted = [tally.figures(kind) | Standing().figures(kind) for kind, tally in self._tallies.items()]
        return added([*counted, *(pool.standing().figures(pool.kind) for pool in list(self._pools))])


@functools.cache
def census() -> Census:
    """This process's own."""
    return Census()


def added(parts: Iterable[Mapping[str, float]]) -> Figures:
    """The sums, name by name."""
    found: Figures = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found.get(name, 0.0) + value
    return found


def counters(figures: Mapping[str, float]) -> Figures:
    """Those that only grow: what a process that has ended leaves to the sum."""
    return {name: value for name, value in figures.items() if name.partition("{")[0].endswith(_COUNTS)}
