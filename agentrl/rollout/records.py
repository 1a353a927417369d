"""The pool's nouns: what became of a position, what is asked, stored and taken, and the rule that chooses a batch."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from agentrl.types import Version


class State(enum.StrEnum):
    """What became of a position."""

    WAITING = "waiting"
    RUNNING = "running"
    POOLED = "pooled"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class Ask:
    """A position to play; `attempt` counts the earlier groups of it that were thrown away for their age."""

    position: int
    attempt: int


@dataclass(frozen=True, slots=True)
class TakeRecord:
    """One batch: `positions` in the order they were chosen."""

    id: int
    step: int
    version: Version
    positions: tuple[int, ...]
    cursor: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """What an operation did to positions, for those who keep count of live groups."""

    take: TakeRecord | None = None
    new: bool = False
    """Whether `take` was made by this call (not one that was already there)."""
    left: tuple[int, ...] = ()
    """Taken groups that are live no more."""
    dropped: tuple[Ask, ...] = ()
    """Pooled groups that grew too old; to be asked again."""
    given_up: tuple[int, ...] = ()
    """Pooled groups that grew too old once too often."""


@dataclass(frozen=True, slots=True)
class Content:
    """What is live, after a start or a resume."""

    waiting: tuple[Ask, ...]
    pooled: tuple[int, ...]
    taken: tuple[int, ...]
    fresh: int
    """The first position that was never asked."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An encoded group on its way to disk."""

    position: int
    attempt: int
    labels: tuple[Version, ...]
    body: bytes
    chat: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class TakeRule:
    """How a batch is chosen: `batch` groups, none older than `staleness`, ages of `running` groups in mind.

    `running` holds, for each group that runs, the smallest version its tokens can have. `last` takes what is there.
    """

    batch: int
    staleness: int
    wait: bool
    max_asks: int
    running: tuple[int, ...] = field(default=())
    last: bool = False


class Candidate(NamedTuple):
    """A pooled group and the smallest version of its tokens; None where nothing in it is trained."""

    position: int
    oldest: int | None


def choose(pooled: Sequence[Candidate], number: int, rule: TakeRule) -> list[int]:
    """The positions of the batch for a step with weights `number`, earliest deadline first; empty: not yet.

    A group's deadline is the last version at which it may be taken: oldest token + staleness. Every candidate is still
    young enough.
    """
    queue = sorted((_deadline(c.oldest, rule), c.position) for c in pooled)
    chosen, rest = queue[: rule.batch], queue[rule.batch :]
    if not chosen or (len(chosen) < rule.batch and not rule.last):
        return []
    if rule.wait:
        running = [oldest + rule.staleness for oldest in rule.running]
        if _would_expire(chosen[-1][0], [d for d, _ in rest] + running, running, number, rule.batch):
            return []
    return [position for _, position in chosen]


def _deadline(oldest: int | None, rule: TakeRule) -> int:
    return 1 << 60 if oldest is None else oldest + rule.staleness


def _would_expire(last: int, remaining: list[int], running: list[int], number: int, batch: int) -> bool:
    """Whether a step now, whose least urgent group has the deadline `last`, dooms a live group that waiting could save.

    After it, steps come at versions number+1, number+2, …, each with `batch` places; earliest deadline first is
    optimal, so the remaining live groups fit exactly where each meets its deadline in that order. Waiting helps only
    where a running group is more urgent than a chosen one; otherwise it would be a wait for nothing.
    """
    if not any(deadline < last for deadline in running):
        return False
    return any(deadline < number + 1 + place // batch for place, deadline in enumerate(sorted(remaining)))


def join_labels(labels: Iterable[Version]) -> str:
    """Labels as one text."""
    return " ".join(str(label) for label in sorted(labels))


def split_labels(text: str) -> list[Version]:
    """The inverse."""
    return [Version.parse(label) for label in text.split()]


def record_of(row: tuple[Any, ...]) -> TakeRecord:
    """A row of the table of takes."""
    take, step, incarnation, number, positions, cursor = row
    return TakeRecord(take, step, Version(incarnation, number), tuple(orjson.loads(positions)), orjson.loads(cursor))
