"""What a simulated run costs, in seconds, and how long its episodes are. Plain numbers: nothing here knows hardware.

A decode step of an engine costs `step + sequence·n + context·C` with n sequences that hold C tokens of cache: weights
are read once, each sequence adds its arithmetic, each cached token is read. Sources of such numbers are
`presets` (first principles) and `calibrate` (a run's own metrics).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, read at a standard normal number `z`: lognormal, or `values`, sorted, where they are given.

    ```python
    lengths = Spread.lognormal(mean=8000.0, sigma=0.9, most=27_648.0)
    lengths.at(0.0)      # the median
    ```
    """

    median: float
    sigma: float = 0.0
    most: float = math.inf
    values: tuple[float, ...] = ()

    @classmethod
    def lognormal(cls, mean: float, sigma: float, most: float = math.inf) -> Spread:
        """Of this mean before the cut at `most`."""
        return cls(mean / math.exp(sigma * sigma / 2), sigma, most)

    @classmethod
    def measured(cls, values: Sequence[float]) -> Spread:
        """What was seen, at most 1,001 quantiles of it."""
        ordered = sorted(values)
        if len(ordered) > 1001:
            ordered = [ordered[round(i * (len(ordered) - 1) / 1000)] for i in range(1001)]
        return cls(ordered[len(ordered) // 2], values=tuple(ordered))

    def at(self, z: float) -> float:
        """The value whose rank among all values is that of `z` among standard normal numbers."""
        if not self.values:
            return min(self.median * math.exp(self.sigma * z), self.most)
        return self.values[min(int(_NORMAL.cdf(z) * len(self.values)), len(self.values) - 1)]

    def moments(self) -> tuple[float, float]:
        """Mean and mean of squares, over 2,000 evenly spaced ranks."""
        points = [self.at(_NORMAL.inv_cdf((i + 0.5) / 2000)) for i in range(2000)] if not self.values else self.values
        return sum(points) / len(points), sum(p * p for p in points) / len(points)

    def rank(self, value: float) -> float:
        """The share of values that are at most `value`."""
        if self.values:
            return bisect.bisect_right(self.values, value) / len(self.values)
        if value >= self.most:
            return 1.0
        return _NORMAL.cdf(math.log(value / self.median) / self.sigma) if self.sigma else float(value >= self.median)


@dataclass(frozen=True, slots=True)
class Workload:
    """What an episode is made of. Lengths are in tokens, times in seconds."""

    response: Spread
    """Sampled tokens a turn."""
    prompt: Spread
    """Tokens before the first turn; the same for all episodes of a row."""
    turns: Spread = Spread(1.0)
    observation: Spread = Spread(0.0)
    """Tokens that the environment adds after a turn."""
    tool: Spread = Spread(0.0)
    """Seconds of a turn's `env.step`."""
    row_share: float = 0.5
    """The share of a response length's (logarithmic) variance that lies between rows, not between samples of a row."""
    equal_share: float = 0.0
    """The share of groups whose rewards are all equal, which `rollout.filter_equal` leaves out."""

    @property
    def sampled(self) -> float:
        """Mean tokens sampled an episode."""
        return self.response.moments()[0] * self.turns.moments()[0]

    @property
    def held(self) -> float:
        """Mean tokens in cache of a sequence that runs: the longer an episode, the more often it is met."""
        mean, square = self.response.moments()
        turns, turns_square = self.turns.moments()
        added = self.observation.moments()[0]
        grown = turns * (square / max(mean, 1e-9)) if turns <= 1 else turns_square / turns * (mean + added)
        return self.prompt.moments()[0] + grown / 2


@dataclass(frozen=True, slots=True)
class EngineCost:
    """One engine server."""

    step: float
    """Seconds of a decode step, whatever it holds."""
    sequence: float
    """More for each sequence in it."""
    context: float = 0.0
    """More for each token of cache that it reads."""
    prefill: float = 0.0
    """Seconds a token of prompt that is not in the cache; nothing is decoded meanwhile."""
    request: float = 0.0
    """Seconds a request, whatever its length; nothing is decoded meanwhile."""
    slots: int = 64
    """Sequences that run at once; more wait."""
    load: float = 1.0
    """Seconds that a publish stops the engine."""
    recompute: bool = True
    """Whether a publish empties the cache, so that what runs is prefilled again."""

    def slower(self, factor: float) -> EngineCost:
        """Every time of generation multiplied; a publish takes as long as before."""
        return replace(
            self,
            step=self.step * factor,
            sequence=self.sequence * factor,
            context=self.context * factor,
            prefill=self.prefill * factor,
            request=self.request * factor,
        )

    def decode(self, sequences: float, context: float) -> float:
        """Seconds of one decode step."""
        return self.step + self.sequence * sequences + self.context * context


@dataclass(frozen=True, slots=True)
class TrainCost:
    """A trainer, all its ranks together."""

    fixed: float
    """Seconds a step, whatever it holds."""
    token: float
    """Seconds a packed token."""
    square: float = 0.0
    """Seconds a squared token of a sequence: attention."""
    hand_over: float = 0.0
    """Seconds until the weights lie where engines can load them; the trainer waits for that."""

    def step(self, lengths: Sequence[float]) -> float:
        """Seconds of a step on sequences of these lengths."""
        return self.fixed + self.token * sum(lengths) + self.square * sum(n * n for n in lengths)


@dataclass(frozen=True, slots=True)
class ConductorCost:
    """The one process through which everything goes, and whose time is shared by all that is under way."""

    request: float = 1e-3
    """Seconds a model call: rendering, parsing, recording, HTTP; 0.3 to 1.3 ms of CPU were measured."""
    group: float = 3e-3
    """Seconds a group that the trainer fetches, one after the other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration to simulate."""

    engines: int
    engine: EngineCost
    train: TrainCost
    work: Workload
    conductor: ConductorCost = ConductorCost()
    interrupt: bool = True
    """Whether a publish stops engines at the next token; otherwise it waits until what runs has ended."""
