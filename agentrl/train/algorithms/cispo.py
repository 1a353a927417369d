"""CISPO: the ratio is a clipped weight on the log-likelihood, so that every token keeps its gradient (MiniMax-M1)."""

from __future__ import annotations

from torch import Tensor

from agentrl.train import functional
from agentrl.train.algorithm import Algorithm, Output
from agentrl.train.batch import Batch


class CISPO(Algorithm):
    """With `clip_low = 1` there is no lower bound on the weight, as published."""

    def gain(self, batch: Batch, out: Output, proximal: Tensor) -> functional.Gain:
        """clip(u)·A·log π, clip(u) a constant."""
        return functional.cispo_gain(
            out.logprobs,
            proximal,
            batch.advantages,
            batch.mask,
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
        )
