"""The algorithm contract. The base class is decoupled PPO with group-relative advantages; others override a method.

```python
class Centered(Algorithm):
    def credit(self, group):                            # plain Python: one value an episode and turn
        rewards = [e.reward for e in group.episodes if e.reward is not None]
        mean = sum(rewards) / max(len(rewards), 1)
        return [{t.index: e.reward - mean for t in e.turns} if e.scored else {} for e in group.episodes]
```

and `algorithm.name = "my_module:Centered"` in the run's config.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.train import functional
from agentrl.train.batch import Batch, Credit
from agentrl.train.credit import group_credit
from agentrl.train.manifest import EpisodeEntry, GroupEntry
from agentrl.train.options import AlgorithmOptions

Array = NDArray[Any]


class Output(NamedTuple):
    """What the policy says about a batch: float32 `[T]`, 0 off the mask, log-probs at the sampling temperature.

    `logprobs` carries the gradient, and so does `entropy` where the algorithm asks for it.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    """The critic's, of the state before each token; carries the gradient. None without a critic."""


class Mean(NamedTuple):
    """A metric that is `total / weight`, summed over micro-batches and ranks."""

    total: Tensor
    weight: Tensor


class Largest(NamedTuple):
    """A metric that is the largest value over micro-batches and ranks."""

    value: Tensor


Metrics = Mapping[str, Mean | Largest]
"""The same names from every batch, a dummy's too, or the ranks could not add them up."""


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """The trained tokens of one episode in order, wherever they were packed. float64 `[n]`, `turns` int64."""

    turns: Array
    """The turn index of each token."""
    credit: Array
    """What `credit` gave the token's turn."""
    values: Array
    """The critic's values of the state before each token; 0 without a critic."""
    penalty: Array
    """β·KL of each token where it is taken from the reward; else 0."""

    @property
    def last_of_turn(self) -> Array:
        """bool: whether the token is the last of its turn."""
        return np.append(self.turns[1:] != self.turns[:-1], True)


class Estimate(NamedTuple):
    """For the tokens of an episode: their advantages `[n]`, and what a critic is to predict `[n]`."""

    advantages: Array
    returns: Array | None = None


class Algorithm:
    """Decoupled PPO. Subclass it, override what differs, and name the class in the run's config."""

    demonstrations = False
    """Whether the tokens to train are demonstrations (imitation) or the policy's own samples."""
    critic = False
    """Whether the policy has a critic: `batch.values` and `out.values`."""

    def __init__(self, options: AlgorithmOptions) -> None:
        self.options = options

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss differentiates `out.entropy`."""
        return self.options.entropy_bonus > 0

    @property
    def reference(self) -> bool:
        """Whether `batch.reference` is wanted."""
        return self.options.kl_coef > 0

    @property
    def penalizes(self) -> bool:
        """Whether the KL divergence from the reference is taken from the reward."""
        return self.options.kl_coef > 0 and self.options.kl_in == "reward"

    def credit(self, group: GroupEntry) -> Credit:
        """A value for each episode and turn, from rewards alone; a turn that gets none is not trained."""
        found = group_credit(group, self.options)
        return [{} if self.leaves_out(e) else c for e, c in zip(group.episodes, found, strict=True)]

    def leaves_out(self, episode: EpisodeEntry) -> bool:
        """Whether the episode, though scored, is not to be trained."""
        return self.options.leave_out_truncated and episode.stop != "finished"

    def advantages(self, episode: EpisodeTokens) -> Estimate:
        """The advantage of each token: its turn's credit, less the penalties from it to the episode's end."""
        return Estimate(episode.credit - episode.penalty[::-1].cumsum()[::-1])

    def gain(self, batch: Batch, out: Output, proximal: Tensor) -> functional.Gain:
        """The surrogate objective of each token, before the behaviour weight."""
        options = self.options
        return functional.ppo_gain(
            out.logprobs,
            proximal,
            batch.advantages,
            batch.mask,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
        )

    def loss(self, batch: Batch, out: Output) -> tuple[Tensor, Metrics]:
        """This batch's part of the step's loss, a scalar: the sum of `batch.weights` times the tokens' losses."""
        options = self.options
        proximal = out.logprobs.detach() if batch.proximal is None else batch.proximal
        found = self.gain(batch, out, proximal)
        weight, capped = functional.behaviour_weight(
            proximal,
            batch.behaviour,
            batch.mask,
            correction=options.behaviour,
            cap=options.behaviour_cap,
            floor=options.behaviour_floor,
            level=options.behaviour_level,
            sequences=batch.sequences,
        )
        loss = -(batch.weights * weight * found.gain).sum()
        if options.entropy_bonus > 0:
            loss = loss - options.entropy_bonus * (batch.weights * out.entropy).sum()
        metrics = policy_metrics(batch, out, found, proximal, weight, capped)
        if batch.reference is not None:
            divergence = functional.kl(out.logprobs, batch.reference, batch.mask, options.kl_estimator)
            if options.kl_in == "loss":
                loss = loss + options.kl_coef * (batch.weights * divergence).sum()
            metrics |= reference_metrics(batch, out.logprobs, options.kl_coef * divergence.detach())
        return loss, metrics


@torch.no_grad()
def reference_metrics(batch: Batch, logprobs: Tensor, penalty: Tensor) -> dict[str, Mean | Largest]:
    """How far the policy is from the reference, and what that costs."""
    if batch.reference is None:
        return {}
    divergence = functional.kl(logprobs, batch.reference, batch.mask, "k3")
    return {"kl/reference": mean(divergence, batch.mask), "kl/penalty": mean(penalty, batch.mask)}


STALENESS_BINS = (0, 1, 2, 4, 8)
"""The last is open: 8 versions and more."""


@torch.no_grad()
def policy_metrics(
    batch: Batch, out: Output, found: functional.Gain, proximal: Tensor, weight: Tensor, capped: Tensor
) -> dict[str, Mean | Largest]:
    """The metrics of a policy-gradient loss, over trained tokens."""
    mask = batch.mask
    behave = functional.log_ratio(out.logprobs, batch.behaviour, mask)
    drift = functional.log_ratio(proximal, batch.behaviour, mask)
    return {
        "ratio/mean": mean(found.ratio, mask),
        "ratio/max": largest(found.ratio, mask),
        "ratio/clip_fraction": mean(found.clipped.float(), mask),
        "ratio/clip_low_fraction": mean((found.clipped & (batch.advantages < 0)).float(), mask),
        "ratio/clip_high_fraction": mean((found.clipped & (batch.advantages > 0)).float(), mask),
        "behaviour/weight_mean": mean(weight, mask),
        "behaviour/cap_fraction": mean(capped.float(), mask),
        "behaviour/abs_log_weight_max": largest(drift.abs(), mask),
        "behaviour/ratio_mean": mean(behave.exp(), mask),
        "kl/proximal": mean(functional.kl(proximal, out.logprobs, mask, "k3"), mask),
        "kl/behaviour": mean(torch.expm1(behave) - behave, mask),
        "entropy": mean(out.entropy, mask),
        "logprob/mean": mean(out.logprobs, mask),
        "advantage/mean": mean(batch.advantages, mask),
        "advantage/square": mean(batch.advantages.square(), mask),
        "advantage/positive_share": mean((batch.advantages > 0).float(), mask),
        "advantage/abs/max": largest(batch.advantages.abs(), mask),
        "staleness/mean": mean(batch.staleness.float(), mask),
        "staleness/max": largest(batch.staleness.float(), mask),
        **_histogram("staleness/queue", batch.queued, mask),
        **_histogram("staleness/flight", batch.staleness - batch.queued, mask),
    }


def _histogram(name: str, ages: Tensor, mask: Tensor) -> dict[str, Mean | Largest]:
    """The share of tokens in each bin, of how many versions passed in the queue or while the episode ran."""
    edges = [*STALENESS_BINS, 1 << 30]
    found: dict[str, Mean | Largest] = {}
    for low, high in itertools.pairwise(edges):
        label = f"{low}+" if high == edges[-1] else str(low) if high == low + 1 else f"{low}-{high - 1}"
        found[f"{name}_{label}"] = mean(((ages >= low) & (ages < high)).float(), mask)
    return found


def mean(values: Tensor, mask: Tensor) -> Mean:
    """The mean over the mask, to be completed over micro-batches and ranks."""
    return Mean(torch.where(mask, values.float(), 0.0).sum(), mask.sum().float())


def largest(values: Tensor, mask: Tensor) -> Largest:
    """The largest value on the mask; 0 where it is empty, so for values >= 0."""
    return Largest(torch.where(mask, values.float(), 0.0).amax())


def load(options: AlgorithmOptions) -> Algorithm:
    """The algorithm that the options name; ConfigError where it cannot be had."""
    module, _, name = options.path.partition(":")
    try:
        found = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        raise ConfigError(
            f"algorithm {options.name!r}: {type(error).__name__}: {error}; name a 'module:Class'"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"algorithm {options.name!r} is {found!r}, not a subclass of agentrl.train.algorithm.Algorithm"
        )
    return found(options, **options.args)
