"""Supervised fine-tuning: the negative log-likelihood of demonstration tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.train import algorithm
from agentrl.train.algorithm import Metrics, Output, largest, mean
from agentrl.train.batch import Batch, Credit
from agentrl.train.manifest import GroupEntry


class SFT(algorithm.Algorithm):
    """Imitates `Demonstration` segments; rewards play no part."""

    demonstrations = True

    def credit(self, group: GroupEntry) -> Credit:
        """None."""
        return [{} for _ in group.episodes]

    def loss(self, batch: Batch, out: Output) -> tuple[Tensor, Metrics]:
        """-log π(token)."""
        nll = torch.where(batch.mask, -out.logprobs, 0.0)
        with torch.no_grad():
            metrics: Metrics = {
                "nll": mean(nll, batch.mask),
                "nll/max": largest(nll, batch.mask),
                "entropy": mean(out.entropy, batch.mask),
            }
        return (batch.weights * nll).sum(), metrics
