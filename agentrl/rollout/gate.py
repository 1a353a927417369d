"""Admission: how many groups may live at once, so that none has to grow older than the staleness bound.

A group lives from its admission until the weights that it helped to make are published: running, in the pool, or taken.
At most (η+1)·B live. Whatever leaves without being trained (filtered, dropped, failed) makes room at once, so nothing
leaks. Pure bookkeeping by position: no clock, no I/O.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Iterable

from agentrl.errors import AgentRLError, ConfigError


class Stage(enum.Enum):
    """Where a live group is."""

    RUNNING = "running"
    POOLED = "in the pool"
    TAKEN = "taken"


class Gate:
    """Live groups and their stages.

    ```python
    gate = Gate(batch=8, staleness=4, concurrency=None, samples=8)
    if await gate.room(timeout=5.0):
        gate.enter(position)
    ```
    """

    def __init__(self, *, batch: int, staleness: int, concurrency: int | None, samples: int) -> None:
        if batch < 1 or staleness < 0 or samples < 1:
            raise ConfigError(f"batch {batch} and samples {samples} must be >= 1, staleness {staleness} >= 0")
        if concurrency is not None and concurrency < samples:
            raise ConfigError(f"concurrency {concurrency} < {samples} episodes of one group: no group could start")
        self.limit = (staleness + 1) * batch
        self._concurrency = concurrency
        self._samples = samples
        self._stages: dict[int, Stage] = {}
        self._episodes: dict[int, int] = {}
        self._playing = 0
        self._opened = asyncio.Event()

    @property
    def live(self) -> int:
        """Groups that count against the limit."""
        return len(self._stages)

    @property
    def episodes(self) -> int:
        """Episodes that run now."""
        return self._playing

    def count(self, stage: Stage) -> int:
        """Live groups in `stage`."""
        return sum(1 for s in self._stages.values() if s is stage)

    @property
    def open(self) -> bool:
        """Whether one more group may start now."""
        free = self._concurrency is None or self.episodes + self._samples <= self._concurrency
        return free and self.live < self.limit

    async def room(self, timeout: float) -> bool:
        """Wait until one more group may start; False after `timeout` seconds. `str(gate)` says what it waits for."""
        try:
            async with asyncio.timeout(timeout):
                while not self.open:
                    self._opened.clear()
                    await self._opened.wait()
        except TimeoutError:
            return False
        return True

    def enter(self, position: int) -> None:
        """A group starts to run. Only after `room`, with nothing awaited in between."""
        if not self.open:
            raise AgentRLError(f"group {position} was admitted although the gate is shut: {self}")
        self._move(position, None, Stage.RUNNING)
        self._episodes[position] = self._samples
        self._playing += self._samples

    def restore(self, pooled: Iterable[int], taken: Iterable[int]) -> None:
        """What the pool holds, after a start or a resume; groups that run go on.

        They may be more than the limit, if that was lowered.
        """
        running = [position for position, stage in self._stages.items() if stage is Stage.RUNNING]
        self._stages = {
            **dict.fromkeys(pooled, Stage.POOLED),
            **dict.fromkeys(taken, Stage.TAKEN),
            **dict.fromkeys(running, Stage.RUNNING),
        }
        self._notify()

    def episode_done(self, position: int) -> None:
        """One of the group's episodes has ended, the group still runs."""
        if self._episodes.get(position, 0) > 0:
            self._episodes[position] -= 1
            self._playing -= 1
            self._notify()

    def pooled(self, position: int) -> None:
        """A running group is in the pool."""
        self._move(position, Stage.RUNNING, Stage.POOLED)

    def taken(self, positions: Iterable[int]) -> None:
        """Pooled groups are handed to the trainer."""
        for position in positions:
            self._move(position, Stage.POOLED, Stage.TAKEN)

    def leave(self, position: int) -> None:
        """A live group is trained and published, filtered, dropped or failed."""
        self._move(position, self._stages.get(position), None)

    def _move(self, position: int, before: Stage | None, after: Stage | None) -> None:
        now = self._stages.get(position)
        if now is not before or before is after:
            raise AgentRLError(f"group {position} is {_name(now)} and cannot go from {_name(before)} to {_name(after)}")
        if before is Stage.RUNNING:
            self._playing -= self._episodes.pop(position, 0)
        if after is None:
            del self._stages[position]
        else:
            self._stages[position] = after
        self._notify()

    def _notify(self) -> None:
        if self.open:
            self._opened.set()

    def __str__(self) -> str:
        counts = Counter(self._stages.values())
        parts = ", ".join(f"{counts[stage]} {stage.value}" for stage in Stage)
        cap = "" if self._concurrency is None else f"; {self.episodes} of {self._concurrency} episodes run"
        return f"{self.live} of {self.limit} groups live ({parts}){cap}"


def _name(stage: Stage | None) -> str:
    return "not live" if stage is None else stage.value
