"""The nouns. Everything that crosses a room's border is one of these.

* `Message`     an OpenAI chat message. An *observation* is the list of new messages only.
* `Step`        Gymnasium's 5-tuple, readable by name.
* `Version`     the label of a set of weights, `incarnation.number`; never reused for other weights.
* `Segment`     contiguous tokens of one origin: context, sampled by one version, or a demonstration.
* `Trajectory`  ordered segments: one contiguous token sequence, exactly what the engine was sent and sent back.
* `Turn`        where an action ended and what it earned.
* `Episode`     one play of one data row by one sample of the policy.
* `Group`       the episodes of one row: the unit of rollout, staleness and baselines.

Values are checked at construction and never mutated. Masks, versions per token and log-probs per token are derived,
never stored a second time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
"""An OpenAI chat message: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`, `reasoning_content`."""
Info = dict[str, Any]
Row = Mapping[str, Any]
"""One row of data, JSON-serialisable."""
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class Step(NamedTuple):
    """What `Env.step` returns: Gymnasium's five values by position, readable by name.

    `terminated` says that the task itself ended, `truncated` that something outside the task cut it short: a value
    estimate may be bootstrapped after the second and never after the first. `reward` is None where there is no verdict.
    """

    observation: list[Message]
    reward: float | None
    terminated: bool
    truncated: bool
    info: Info


class Version(NamedTuple):
    """The label of a set of weights. An incarnation is one continuation from a checkpoint.

    `number` counts optimizer updates since the first start of the run and goes on across resumes; two labels with the
    same number and different incarnations are different weights.
    """

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"

    @classmethod
    def parse(cls, label: str) -> Version:
        """Read `"2.17"`; ValueError for anything else."""
        incarnation, dot, number = label.partition(".")
        if not dot or not (incarnation.isdecimal() and number.isdecimal()):
            raise ValueError(f"weight version {label!r} is not of the form 'incarnation.number', e.g. '1.0'")
        return cls(int(incarnation), int(number))


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens that the policy was shown."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens that the policy sampled.

    `trained=False` marks tokens whose reported log-prob is not that of the distribution they were drawn from
    (top-p, top-k, penalties, a grammar); they are context to the loss.
    """

    version: Version
    temperature: float = 1.0
    trained: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature!r} is not a finite number >= 0")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Tokens to imitate (supervised fine-tuning); they have no behaviour policy."""


Source = Context | Sampled | Demonstration


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Contiguous tokens of one origin.

    `tokens` is int32 `[n]`, n > 0; `logprobs` is float32 `[n]` for `Sampled` and None otherwise.
    """

    tokens: Int32Array
    logprobs: Float32Array | None
    source: Source

    def __post_init__(self) -> None:
        tokens = np.array(self.tokens, dtype=np.int32)
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"a segment needs a non-empty 1-D array of tokens, got shape {tokens.shape}")
        if int(tokens.min()) < 0:
            raise ValueError(f"token ids must be >= 0, got {int(tokens.min())}")
        object.__setattr__(self, "tokens", _frozen(tokens))
        if not isinstance(self.source, Sampled):
            if self.logprobs is not None:
                raise ValueError(f"a {type(self.source).__name__} segment has no log-probs")
            return
        if self.logprobs is None:
            raise ValueError("missing_logprobs: a sampled segment needs one log-prob a token, got None")
        logprobs = np.array(self.logprobs, dtype=np.float32)
        if logprobs.shape != tokens.shape:
            raise ValueError(f"{tokens.size} tokens but {logprobs.size} log-probs: they must be equal in number")
        if not bool(np.isfinite(logprobs).all()) or float(logprobs.max()) > 1e-3:
            raise ValueError("log-probs must be finite and <= 0")
        object.__setattr__(self, "logprobs", _frozen(logprobs))

    def __len__(self) -> int:
        return int(self.tokens.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        same_logprobs = (self.logprobs is None) == (other.logprobs is None) and (
            self.logprobs is None or other.logprobs is None or np.array_equal(self.logprobs, other.logprobs)
        )
        return self.source == other.source and np.array_equal(self.tokens, other.tokens) and same_logprobs

    __hash__ = None  # type: ignore[assignment]


class SplitReason(enum.StrEnum):
    """Why a trajectory started."""

    START = "start"
    """The first of its agent."""
    TEMPLATE = "template"
    """The model's chat template rewrote the history."""
    EDITED = "edited"
    """The agent changed or compacted earlier messages."""
    BRANCH = "branch"
    """The agent went on from an earlier point of the conversation."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One contiguous token sequence, as the engine saw it.

    `abandoned` marks a branch that the agent dropped: it is kept for inspection and left out of training.
    """

    segments: tuple[Segment, ...]
    reason: SplitReason = SplitReason.START
    agent: str = ""
    abandoned: bool = False

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("a trajectory needs at least one segment")

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def tokens(self) -> Int32Array:
        """`[T]` int32."""
        return np.concatenate([s.tokens for s in self.segments])

    @property
    def loss_mask(self) -> BoolArray:
        """`[T]`: True where the policy's own choice (or a demonstration) is to be trained."""
        return self._per_token(lambda source: _is_trained(source), np.bool_)

    @property
    def logprobs(self) -> Float32Array:
        """`[T]` float32, behaviour log-probs at the sampling temperature; 0 where nothing was sampled."""
        return np.concatenate(
            [np.zeros(len(s), np.float32) if s.logprobs is None else s.logprobs for s in self.segments]
        )

    @property
    def versions(self) -> Int32Array:
        """`[T]` int32 version numbers; -1 where nothing was sampled."""
        return self._per_token(lambda src: src.version.number if isinstance(src, Sampled) else -1, np.int32)

    @property
    def temperatures(self) -> Float32Array:
        """`[T]` float32; 1 where nothing was sampled."""
        return self._per_token(lambda src: src.temperature if isinstance(src, Sampled) else 1.0, np.float32)

    @property
    def sampled_versions(self) -> frozenset[Version]:
        """The labels of all weights that produced a trainable token."""
        return frozenset(s.source.version for s in self.segments if isinstance(s.source, Sampled) and s.source.trained)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version number of any trainable token; None where there is none."""
        return min((v.number for v in self.sampled_versions), default=None)

    def _per_token(self, value: Any, dtype: Any) -> NDArray[Any]:
        return np.repeat(
            np.array([value(s.source) for s in self.segments], dtype=dtype), [len(s) for s in self.segments]
        )


def _is_trained(source: Source) -> bool:
    return isinstance(source, Demonstration) or (isinstance(source, Sampled) and source.trained)


@dataclass(frozen=True, slots=True)
class Turn:
    """Where an action ended and what it earned.

    The action's tokens are the sampled ones of `trajectory` after the previous turn's `end` there and before `end`.
    An action whose model calls lie in several trajectories has a mark for each, all with the same `index`; the
    reward stands on the last and the others carry 0. `trajectory` is None where an API model played.
    """

    index: int
    trajectory: int | None
    end: int
    reward: float | None
    agent: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.index < 0 or self.end < 0 or (self.trajectory is not None and self.trajectory < 0):
            raise ValueError(f"turn with a negative place: {self}")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward!r} is not finite; use None for 'no verdict'")


class Stop(enum.StrEnum):
    """Why an episode ended."""

    FINISHED = "finished"
    """The environment said terminated."""
    TRUNCATED = "truncated"
    """The environment said truncated."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TIME_LIMIT = "time_limit"
    AGENT_ERROR = "agent_error"
    """The agent's code raised."""
    ENV_ERROR = "env_error"
    """The environment's code raised, or broke its contract."""
    NO_VERDICT = "no_verdict"
    """The reward gave no verdict."""
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_LOST = "engine_lost"
    CANCELLED = "cancelled"

    @property
    def scored(self) -> bool:
        """Whether the episode's reward is the policy's doing: only then does it enter a baseline or a gradient."""
        return self in _SCORED


_SCORED = frozenset({Stop.FINISHED, Stop.TRUNCATED, Stop.MAX_TURNS, Stop.MAX_TOKENS, Stop.TIME_LIMIT})


@dataclass(frozen=True, slots=True)
class Episode:
    """One play of one row.

    `group` is the row's position in the run's data order, `attempt` counts how often the row was asked, `sample` is
    the place within the group. `seed` made the environment's start and is equal within the group.
    """

    group: int
    sample: int
    attempt: int
    seed: int
    row: Row
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    trajectories: tuple[Trajectory, ...]
    stop: Stop
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        for turn in self.turns:
            if turn.trajectory is None:
                continue
            if turn.trajectory >= len(self.trajectories):
                raise ValueError(f"turn {turn.index} names trajectory {turn.trajectory} of {len(self.trajectories)}")
            if turn.end > len(self.trajectories[turn.trajectory]):
                raise ValueError(f"turn {turn.index} ends at {turn.end}, past its trajectory's end")

    @property
    def scored(self) -> bool:
        """Whether the episode has a verdict that the policy earned."""
        return self.stop.scored and all(t.reward is not None for t in self.turns)

    @property
    def reward(self) -> float | None:
        """The sum of the turns' rewards; None where there is no verdict."""
        return sum(t.reward or 0.0 for t in self.turns) if self.scored else None

    @property
    def oldest_version(self) -> int | None:
        """The smallest version number of any token that would be trained."""
        ages = [t.oldest_version for t in self.trajectories if not t.abandoned]
        return min((a for a in ages if a is not None), default=None)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one row. `id` is the row's position in the run's data order, over all epochs."""

    id: int
    attempt: int
    epoch: int
    env: str
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        if not self.episodes:
            raise ValueError(f"group {self.id} has no episodes")
        for episode in self.episodes:
            if episode.group != self.id:
                raise ValueError(f"episode of group {episode.group} in group {self.id}")

    @property
    def oldest_version(self) -> int | None:
        """The smallest version number of any token that would be trained, unscored episodes left out."""
        ages = [e.oldest_version for e in self.episodes if e.scored]
        return min((a for a in ages if a is not None), default=None)

    @property
    def versions(self) -> frozenset[Version]:
        """The labels of all weights that produced a trainable token of a scored episode."""
        found: set[Version] = set()
        for episode in self.episodes:
            if episode.scored:
                for trajectory in episode.trajectories:
                    if not trajectory.abandoned:
                        found |= trajectory.sampled_versions
        return frozenset(found)
