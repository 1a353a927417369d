"""Sampling: which token each row takes, and its log-prob under log_softmax(logits / T).

A row's random number depends on its seed and on the token's absolute position alone, so a sample does not depend on
what else runs, on interruptions, or on which engine goes on with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.types import Int32Array


@dataclass(frozen=True, slots=True)
class Rule:
    """How one request samples. `temperature` 0 takes the likeliest token."""

    temperature: float = 1.0
    seed: int = 0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top: int = 0

    @property
    def penalised(self) -> bool:
        """Whether the logits themselves change."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def cut(self) -> bool:
        """Whether unlikely tokens are cut off."""
        return self.top_p != 1 or self.top_k > 0 or self.min_p > 0


class Sampled(NamedTuple):
    """One token a row; `table` is log_softmax(logits / T) [n, V]."""

    tokens: list[int]
    logprobs: list[float]
    table: Tensor


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> Tensor:
    """`[n]` float64 in [0, 1): splitmix64 of seed and position."""
    with np.errstate(over="ignore"):
        x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample(
    logits: Tensor, temperatures: Tensor, uniform: Tensor, special: dict[int, tuple[Rule, Int32Array, int]]
) -> Sampled:
    """Take a token for each row of `logits` [n, V].

    `temperatures` [n], 0 for greedy; `special` has the rows whose rule changes the distribution, with their tokens so
    far and the length of their prompt. Cut rows report the log-prob of the whole distribution, as SGLang does.
    """
    temperatures, uniform = temperatures.to(logits.device), uniform.to(logits.device)
    for row, (rule, tokens, prompt) in special.items():
        if rule.penalised:
            _penalise(logits[row], rule, tokens, prompt)
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperatures)[:, None], -1)
    probs = logprobs.exp()
    for row, (rule, _, _) in special.items():
        if rule.cut:
            probs[row] = _cut(probs[row], rule)
    cumulative = probs.cumsum(-1)
    # Strictly greater: a token of probability 0 is never taken.
    drawn = torch.searchsorted(cumulative, (uniform.to(cumulative.dtype) * cumulative[:, -1])[:, None], right=True)
    drawn = drawn[:, 0].clamp_(max=logits.shape[-1] - 1)
    if bool(greedy.any()):
        drawn = torch.where(greedy, logits.argmax(-1), drawn)
    return Sampled(drawn.tolist(), logprobs.gather(1, drawn[:, None])[:, 0].tolist(), logprobs)


def likeliest(logprobs: Tensor, k: int) -> list[tuple[float, int]]:
    """(log-prob, id) of the `k` likeliest tokens of one row, best first."""
    values, ids = logprobs.topk(min(k, logprobs.numel()))
    return list(zip(values.tolist(), ids.tolist(), strict=True))


def _penalise(logits: Tensor, rule: Rule, tokens: Int32Array, prompt: int) -> None:
    if rule.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(tokens).astype(np.int64)).to(logits.device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / rule.repetition_penalty, old * rule.repetition_penalty)
    ids, counts = np.unique(tokens[prompt:], return_counts=True)
    if ids.size:
        taken = torch.from_numpy(counts.astype(np.float32)) * rule.frequency_penalty + rule.presence_penalty
        logits[torch.from_numpy(ids.astype(np.int64)).to(logits.device)] -= taken.to(logits.device)


def _cut(probs: Tensor, rule: Rule) -> Tensor:
    ordered, order = probs.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if rule.top_k > 0:
        keep[rule.top_k :] = False
    if rule.top_p < 1:
        keep &= ordered.cumsum(-1) - ordered < rule.top_p
    if rule.min_p > 0:
        keep &= ordered >= rule.min_p * ordered[0]
    return torch.zeros_like(probs).scatter_(0, order, ordered * keep)
