"""A backend of one process without DeepSpeed: the oracle of the real one, and quick enough for learning tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from agentrl.train.algorithm import Algorithm, Largest, Mean, Metrics, Output
from agentrl.train.batch import Batch
from agentrl.train.model import load_policy

Loss = Callable[[Batch, Output], tuple[Tensor, Metrics]]


class PlainBackend:
    """AdamW on whole tensors, gradients cut to a norm, the same groups of parameters as the real backend's."""

    rank, world = 0, 1

    def __init__(
        self, folder: Path, algorithm: Algorithm, *, decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        self.policy = load_policy(folder, torch.float32, critic=algorithm.critic)
        self.frozen = load_policy(folder, torch.float32).requires_grad_(False) if algorithm.reference else None
        weights = list(self.policy.model.parameters())
        head = [] if self.policy.value_head is None else list(self.policy.value_head.parameters())
        self.rates = [1.0, 1.0, algorithm.options.value_rate]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in weights if p.ndim > 1], "weight_decay": decay},
                {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
                {"params": head, "weight_decay": 0.0},
            ],
            betas=betas,
        )

    def predict(self, batches: Sequence[Batch]) -> list[Output]:
        with torch.no_grad():
            return [self.policy(batch) for batch in batches]

    def reference(self, batches: Sequence[Batch]) -> list[Tensor]:
        assert self.frozen is not None
        with torch.no_grad():
            return [self.frozen(batch).logprobs for batch in batches]

    def sum(self, values: Tensor) -> Tensor:
        return values.clone()

    def step(
        self, batches: Sequence[Batch], loss: Loss, *, lr: float, entropy_gradient: bool = False, norm: float = 1.0
    ) -> dict[str, float]:
        self.optimizer.zero_grad()
        metrics = []
        for batch in batches:
            value, found = loss(batch, self.policy(batch, entropy_gradient))
            torch.autograd.backward(value)
            metrics.append(found)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), norm)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * rate
        self.optimizer.step()
        return {name: reduced([m[name] for m in metrics]) for name in metrics[0]}


def reduced(parts: Sequence[Mean | Largest]) -> float:
    means = [p for p in parts if isinstance(p, Mean)]
    if means:
        weight = sum(float(p.weight) for p in means)
        return sum(float(p.total) for p in means) / max(weight, 1e-12)
    return max(float(p.value) for p in parts if isinstance(p, Largest))
