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
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.train import functional
from agentrl.train.batch import Batch, Credit
from agentrl.train.manifest import GroupEntry
from agentrl.train.options import AlgorithmOptions


class Output(NamedTuple):
    """What the policy says about a batch: float32 `[T]`, 0 off the mask, log-probs at the sampling temperature.

    `logprobs` carries the gradient, and so does `entropy` where the algorithm asks for it.
    """

    logprobs: Tensor
    entropy: Tensor


class Mean(NamedTuple):
    """A metric that is `total / weight`, summed over micro-batches and ranks."""

    total: Tensor
    weight: Tensor


class Largest(NamedTuple):
    """A metric that is the largest value over micro-batches and ranks."""

    value: Tensor


Metrics = Mapping[str, Mean | Largest]
"""The same names from every batch, a dummy's too, or the ranks could not add them up."""


class Algorithm:
    """Decoupled PPO. Subclass it, override what differs, and name the class in the run's config."""

    demonstrations = False
    """Whether the tokens to train are demonstrations (imitation) or the policy's own samples."""

    def __init__(self, options: AlgorithmOptions) -> None:
        self.options = options

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss differentiates `out.entropy`."""
        return self.options.entropy_bonus > 0

    def credit(self, group: GroupEntry) -> Credit:
        """A value for each episode and turn, from rewards alone; an episode without verdict gets none."""
        advantages = functional.group_advantages([e.reward for e in group.episodes], self.options.baseline)
        return [
            {turn.index: advantage for turn in episode.turns} if episode.scored else {}
            for episode, advantage in zip(group.episodes, advantages, strict=True)
        ]

    def advantages(self, batch: Batch) -> Tensor:
        """The advantage of each token `[T]`; here its turn's credit."""
        return batch.credit

    def loss(self, batch: Batch, out: Output) -> tuple[Tensor, Metrics]:
        """This batch's part of the step's loss, a scalar: the sum of `batch.weights` times the tokens' losses."""
        options = self.options
        proximal = out.logprobs.detach() if batch.proximal is None else batch.proximal
        terms = functional.decoupled_ppo(
            out.logprobs,
            proximal,
            batch.behaviour,
            batch.advantages,
            batch.mask,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
            correction=options.behaviour,
            cap=options.behaviour_cap,
        )
        loss = (batch.weights * terms.loss).sum()
        if options.entropy_bonus > 0:
            loss = loss - options.entropy_bonus * (batch.weights * out.entropy).sum()
        return loss, policy_metrics(batch, out, terms, proximal)


@torch.no_grad()
def policy_metrics(batch: Batch, out: Output, terms: functional.Surrogate, proximal: Tensor) -> Metrics:
    """The metrics of a policy-gradient loss, over trained tokens."""
    mask = batch.mask
    behave = functional.log_ratio(out.logprobs, batch.behaviour, mask)
    drift = functional.log_ratio(proximal, batch.behaviour, mask)
    return {
        "ratio/mean": mean(terms.ratio, mask),
        "ratio/max": largest(terms.ratio, mask),
        "ratio/clip_fraction": mean(terms.clipped.float(), mask),
        "behaviour/weight_mean": mean(terms.weight, mask),
        "behaviour/cap_fraction": mean(terms.capped.float(), mask),
        "behaviour/abs_log_weight_max": largest(drift.abs(), mask),
        "kl/proximal": mean(functional.kl(proximal, out.logprobs, mask, "k3"), mask),
        "kl/behaviour": mean(torch.expm1(behave) - behave, mask),
        "entropy": mean(out.entropy, mask),
        "logprob/mean": mean(out.logprobs, mask),
        "advantage/mean": mean(batch.advantages, mask),
        "advantage/square": mean(batch.advantages.square(), mask),
        "staleness/mean": mean(batch.staleness.float(), mask),
        "staleness/max": largest(batch.staleness.float(), mask),
    }


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
