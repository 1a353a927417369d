"""GSPO: the ratio of whole sequences is clipped, not that of tokens (Zheng et al. 2025)."""

from __future__ import annotations

from torch import Tensor

from agentrl.train import functional
from agentrl.train.algorithm import Algorithm, Output
from agentrl.train.batch import Batch


class GSPO(Algorithm):
    """A sequence here is a trajectory: an episode whose history was rewritten has a ratio for each of its parts."""

    def gain(self, batch: Batch, out: Output, proximal: Tensor) -> functional.Gain:
        """min(s·A, clip(s)·A), s the geometric mean of the sequence's ratios."""
        return functional.gspo_gain(
            out.logprobs,
            proximal,
            batch.advantages,
            batch.mask,
            batch.sequences,
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
        )
