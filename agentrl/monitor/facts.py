"""What the index says of an episode, so that ten thousand can be filtered without opening one."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import orjson

from agentrl.types import Episode, Group, Sampled

EPISODE_COLUMNS = (
    "group_id INTEGER NOT NULL",
    "place INTEGER NOT NULL",
    "position INTEGER NOT NULL",
    "sample INTEGER NOT NULL",
    "kind TEXT NOT NULL",
    "fate TEXT NOT NULL",
    "env TEXT NOT NULL",
    "step INTEGER NOT NULL",
    "trained INTEGER",
    "time REAL NOT NULL",
    "reward REAL",
    "stop TEXT NOT NULL",
    "turns INTEGER NOT NULL",
    "tokens INTEGER NOT NULL",
    "sampled INTEGER NOT NULL",
    "trajectories INTEGER NOT NULL",
    "splits TEXT NOT NULL",
    "oldest INTEGER",
    "newest INTEGER",
    "versions TEXT NOT NULL",
    "row TEXT NOT NULL",
    "error TEXT",
)
"""As in CREATE TABLE. `place` is the episode's place in its group, `sampled` its trained tokens, `versions` a JSON
object from label to sampled tokens, `row` the beginning of the data row, `splits` the reasons of later trajectories."""
ROW_CHARACTERS = 240
ERROR_CHARACTERS = 500
_AS_THE_POOL = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class EpisodePlace(NamedTuple):
    """Where an episode belongs."""

    group: Group
    fate: str
    kind: str
    step: int
    time: float


def episode_facts(episode: Episode, index: int, place: EpisodePlace) -> tuple[object, ...]:
    """One row of the index, in the order of `EPISODE_COLUMNS`, without the group's key."""
    versions: Counter[str] = Counter()
    numbers = []
    for trajectory in episode.trajectories:
        for segment in trajectory.segments:
            if isinstance(segment.source, Sampled):
                versions[str(segment.source.version)] += len(segment)
                numbers.append(segment.source.version.number)
    reasons = [t.reason.value for t in episode.trajectories if t.reason.value != "start"]
    return (
        index,
        place.group.id,
        episode.sample,
        place.kind,
        place.fate,
        place.group.env,
        place.step,
        None,
        place.time,
        episode.reward,
        episode.stop.value,
        len({turn.index for turn in episode.turns}),
        sum(len(t) for t in episode.trajectories),
        versions.total(),
        len(episode.trajectories),
        " ".join(reasons),
        min(numbers, default=None),
        max(numbers, default=None),
        orjson.dumps(versions).decode(),
        orjson.dumps(dict(episode.row), default=str, option=_AS_THE_POOL).decode()[:ROW_CHARACTERS],
        None if episode.error is None else episode.error[:ERROR_CHARACTERS],
    )
