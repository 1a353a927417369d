"""What a step trains on, as the conductor describes it to every rank: ids, lengths, rewards and turns, no tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.errors import RunError
from agentrl.types import Version


@dataclass(frozen=True, slots=True)
class TurnMark:
    """See `agentrl.types.Turn`."""

    index: int
    trajectory: int | None
    end: int
    reward: float | None
    agent: str


class TrajectoryEntry(NamedTuple):
    """`length` tokens, of which `sampled` are to be trained; an abandoned one is left out."""

    length: int
    sampled: int
    abandoned: bool


@dataclass(frozen=True, slots=True)
class EpisodeEntry:
    """One episode. `reward` is None exactly where it has no verdict; such an episode is in no baseline and no loss."""

    sample: int
    reward: float | None
    stop: str
    turns: tuple[TurnMark, ...]
    trajectories: tuple[TrajectoryEntry, ...]

    @property
    def scored(self) -> bool:
        """Whether the policy earned a verdict."""
        return self.reward is not None


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """The episodes of one row."""

    id: int
    env: str
    episodes: tuple[EpisodeEntry, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One take: the batch of `step`, trained by weights `version`."""

    take: int
    step: int
    version: Version
    cursor: Mapping[str, Any]
    groups: tuple[GroupEntry, ...]
    learn: bool = True
    """False: held-out demonstrations, whose loss is to be reported and not trained on."""


def parse(data: Any) -> Manifest:
    """Read the feed's JSON; RunError names what is wrong with it."""
    try:
        return Manifest(
            take=int(data["take"]),
            step=int(data["step"]),
            version=Version.parse(data["version"]),
            cursor=dict(data["cursor"]),
            groups=tuple(
                GroupEntry(int(g["id"]), str(g["env"]), tuple(_episode(e) for e in g["episodes"]))
                for g in data["groups"]
            ),
            learn=bool(data.get("learn", True)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"the feed sent a manifest that cannot be read: {type(error).__name__}: {error}") from error


def _episode(data: Mapping[str, Any]) -> EpisodeEntry:
    reward = _reward(data["reward"])
    if data["scored"] != (reward is not None):
        raise ValueError(f"an episode with scored = {data['scored']} has the reward {data['reward']!r}")
    return EpisodeEntry(
        sample=int(data["sample"]),
        reward=reward,
        stop=str(data["stop"]),
        turns=tuple(TurnMark(i, t, end, _reward(reward), agent) for i, t, end, reward, agent in data["turns"]),
        trajectories=tuple(
            TrajectoryEntry(int(t["length"]), int(t["sampled"]), bool(t["abandoned"])) for t in data["trajectories"]
        ),
    )


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"reward {value!r} is not a finite number, and None is the only way to say 'no verdict'")
    return float(value)
