"""PPO with a critic: values from a head on the policy's hidden states, generalised advantages over tokens or turns.

One model instead of two: a step is one forward and one backward pass, and a checkpoint holds the critic's head with the
rest. The head's gradient reaches the shared layers with the factor `value_coef`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentrl.train import functional
from agentrl.train.algorithm import Algorithm, EpisodeTokens, Estimate, Mean, Metrics, Output, mean
from agentrl.train.batch import Batch, Credit
from agentrl.train.credit import turn_rewards
from agentrl.train.manifest import GroupEntry


class PPO(Algorithm):
    """Schulman et al. 2017, decoupled; `credit` carries rewards, and the advantages come from the critic."""

    critic = True

    def credit(self, group: GroupEntry) -> Credit:
        """What each episode earned from each turn on.

        As a sum and not turn by turn: where a turn has no trained token, its reward is the doing of those before it.
        """
        return [
            {} if not e.scored or self.leaves_out(e) else functional.returns_to_go(turn_rewards(e, self.options))
            for e in group.episodes
        ]

    def advantages(self, episode: EpisodeTokens) -> Estimate:
        """Generalised advantages, and advantage + value as the critic's target. Tokens of the context take no time."""
        options = self.options
        ends = np.flatnonzero(episode.last_of_turn)
        earned = -np.diff(episode.credit[ends], append=0.0)
        if options.gae_steps == "token":
            rewards = -episode.penalty
            rewards[ends] += earned
            found = np.array(
                functional.gae(rewards.tolist(), episode.values.tolist(), options.discount, options.gae_lambda)
            )
            return Estimate(found, found + episode.values)
        starts = np.append(0, ends[:-1] + 1)
        values = episode.values[starts]
        rewards = earned - np.add.reduceat(episode.penalty, starts)
        found = np.array(functional.gae(rewards.tolist(), values.tolist(), options.discount, options.gae_lambda))
        lengths = ends - starts + 1
        return Estimate(np.repeat(found, lengths), np.repeat(found + values, lengths))

    def loss(self, batch: Batch, out: Output) -> tuple[Tensor, Metrics]:
        """The policy's loss and the critic's."""
        loss, metrics = super().loss(batch, out)
        if out.values is None or batch.values is None or batch.returns is None:
            raise ValueError("PPO needs values, of the step's start and of now: the backend has no critic")
        errors = functional.value_loss(out.values, batch.values, batch.returns, batch.mask, self.options.value_clip)
        loss = loss + self.options.value_coef * (batch.weights * errors).sum()
        return loss, {**metrics, **value_metrics(batch, out.values, batch.returns, errors)}


@torch.no_grad()
def value_metrics(batch: Batch, values: Tensor, returns: Tensor, errors: Tensor) -> dict[str, Mean]:
    """How well the critic predicts."""
    mask = batch.mask
    return {
        "value/loss": mean(errors, mask),
        "value/mean": mean(values, mask),
        "value/error/square": mean((values - returns).square(), mask),
        "return/mean": mean(returns, mask),
        "return/square": mean(returns.square(), mask),
    }
