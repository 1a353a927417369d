"""A saved pool as a source of batches: training again, or from elsewhere, without engines."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from agentrl.conductor.feed import Batch, RunIsOver
from agentrl.errors import ConfigError
from agentrl.types import Group, Sampled, Segment, Version
from agentrl.wire import decode_group


class SavedGroups:
    """The groups that a pool's file still stores, in the order of its data, `batch` a step.

    Goes round `epochs` times, or until the trainer has done its steps. The batch of a step follows from its number, so
    there is nothing to go back to after a restart. Tokens keep the log-probs they were sampled with, and count as
    sampled when this run began: whose weights they came from is not this run's history.

    The file is read only; a run may be using it.
    """

    def __init__(self, pool: Path, batch: int, *, epochs: int | None = None) -> None:
        self._path = pool / "pool.sqlite" if pool.is_dir() else pool
        self._batch = batch
        try:
            with closing(self._open()) as db:
                found = db.execute("SELECT position FROM groups ORDER BY position").fetchall()
        except sqlite3.Error as error:
            raise ConfigError(
                f"{self._path} cannot be read as a pool ({error}): give a run's pool.sqlite, or the run's folder"
            ) from error
        self._positions = [int(row[0]) for row in found]
        if len(self._positions) < batch:
            raise ConfigError(
                f"{self._path} stores {len(self._positions)} groups, a batch is train.batch_groups = {batch}: "
                "lower it, or play more with `agentrl rollout`"
            )
        self._end = None if epochs is None else epochs * len(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        """The batch of `step`, at once."""
        first = (step - 1) * self._batch
        if self._end is not None and first + self._batch > self._end:
            raise RunIsOver(f"all {len(self)} saved groups were trained on")
        places = [(first + i) % len(self) for i in range(self._batch)]
        start = Version(version.incarnation, 0)
        groups = await asyncio.to_thread(self._read, [self._positions[place] for place in places], start)
        return Batch(step, groups, {"step": step})

    def _read(self, positions: list[int], start: Version) -> list[Group]:
        with closing(self._open()) as db:
            query = "SELECT body FROM groups WHERE position = ?"
            bodies = [db.execute(query, (position,)).fetchone() for position in positions]
        gone = [position for position, body in zip(positions, bodies, strict=True) if body is None]
        if gone:
            raise ConfigError(f"{self._path} no longer stores group {gone[0]}: a run that goes on forgets old ones")
        return [_sampled_at(decode_group(row[0]), start) for row in bodies]

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=5.0)


def _sampled_at(group: Group, start: Version) -> Group:
    def relabelled(segment: Segment) -> Segment:
        source = segment.source
        return replace(segment, source=replace(source, version=start)) if isinstance(source, Sampled) else segment

    episodes = [
        replace(
            episode,
            trajectories=tuple(
                replace(trajectory, segments=tuple(relabelled(s) for s in trajectory.segments))
                for trajectory in episode.trajectories
            ),
        )
        for episode in group.episodes
    ]
    return replace(group, episodes=tuple(episodes))
