"""What a run keeps for people to look at: its episodes and what training made of their tokens, in episodes.sqlite."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.conductor.desk import Desk
from agentrl.conductor.feed import Trace
from agentrl.data import env_of
from agentrl.monitor.archive import Archive
from agentrl.types import Episode, Group


class Keeper:
    """Hands everything to the archive; with `keep_mb` 0 to nobody. Nothing here waits, and nothing here can fail."""

    def __init__(self, desk: Desk, env: str, keep_mb: int) -> None:
        self._env = env
        path = desk.folder.path / "episodes.sqlite"
        self._archive = Archive(path, limit=keep_mb << 20, on_error=desk.log.error) if keep_mb else None

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._archive is not None

    def group(self, group: Group, fate: str, step: int) -> None:
        """A group of the rollouts ended while `step` was being worked on."""
        if self._archive is not None:
            self._archive.group(group, fate, step=step)

    def evaluated(self, step: int, row: int, episodes: tuple[Episode, ...]) -> None:
        """The held-out row with this place was played."""
        if self._archive is not None and episodes:
            env = env_of(episodes[0].row, self._env)
            self._archive.group(Group(row, 0, 0, env, episodes), "evaluated", step=step, kind="eval")

    def taken(self, step: int, positions: Sequence[int]) -> None:
        """What `step` trains on."""
        if self._archive is not None:
            self._archive.taken(step, positions)

    def resumed(self, step: int) -> None:
        """The run goes on from a checkpoint of `step`."""
        if self._archive is not None:
            self._archive.resumed(step)

    def trace(self, trace: Trace) -> None:
        """What a step made of its tokens."""
        if self._archive is not None:
            self._archive.trace(trace.step, trace.rank, trace.body)

    def close(self) -> None:
        """Write what waits. Blocks, for seconds at most."""
        if self._archive is not None:
            self._archive.close()
