"""Samples follow the distribution, depend on seed and position alone, and report the right log-probs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.engine.embedded.sampler import Rule, sample, uniforms

N = 20_000


def _draw(
    logits: list[float], rule: Rule, tokens: list[int] | None = None, n: int = N
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    uniform = uniforms(np.full(n, 7, np.uint64), np.arange(n))
    special = {i: (rule, np.array(tokens or [], np.int32), 0) for i in range(n)} if rule.cut or rule.penalised else {}
    table = torch.tensor([logits]).repeat(n, 1)
    got = sample(table, torch.full((n,), rule.temperature), uniform, special)
    return np.bincount(got.tokens, minlength=len(logits)) / n, np.array(got.logprobs)


def test_frequencies_and_logprobs_at_a_temperature() -> None:
    logits = [0.0, 1.0, 2.0, -1e9]
    for temperature in (1.0, 0.5):
        want = torch.tensor(logits).div(temperature).softmax(0).numpy()
        frequencies, logprobs = _draw(logits, Rule(temperature=temperature))
        assert np.abs(frequencies - want).max() < 0.01
        assert frequencies[3] == 0
        assert np.allclose(np.unique(np.round(logprobs, 4)), np.sort(np.log(want[:3])), atol=1e-3)


def test_greedy_takes_the_likeliest() -> None:
    frequencies, logprobs = _draw([0.0, 3.0, 1.0], Rule(temperature=0.0))
    assert frequencies.tolist() == [0, 1, 0]
    assert np.allclose(logprobs, torch.tensor([0.0, 3.0, 1.0]).log_softmax(0)[1].item())


def test_cuts_change_the_draw_and_not_the_logprob() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    for rule, kept in ((Rule(top_k=2), 2), (Rule(top_p=0.75), 2), (Rule(min_p=0.25), 3)):
        frequencies, logprobs = _draw(logits, rule, n=3000)
        assert frequencies[kept:].sum() == 0
        assert abs(frequencies[0] - 0.5 / sum([0.5, 0.3, 0.15][:kept])) < 0.03
        assert np.isclose(logprobs.max(), np.log(0.5), atol=1e-5)


def test_penalties() -> None:
    assert _draw([5.0, 4.9], Rule(temperature=0.0, presence_penalty=0.5), [0], 10)[0].tolist() == [0, 1]
    assert _draw([5.0, 4.9], Rule(temperature=0.0, repetition_penalty=1.5), [0], 10)[0].tolist() == [0, 1]
    assert _draw([5.0, 4.7], Rule(temperature=0.0, frequency_penalty=0.1), [0], 10)[0].tolist() == [1, 0]
    assert _draw([5.0, 4.7], Rule(temperature=0.0, frequency_penalty=0.1), [0] * 4, 10)[0].tolist() == [0, 1]


def test_uniforms_are_uniform_and_independent_of_company() -> None:
    seeds = np.array([1, 2, 3], np.uint64)
    alone = uniforms(seeds[1:2], np.array([5]))
    together = uniforms(seeds, np.array([9, 5, 1]))
    assert alone[0] == together[1]
    many = uniforms(np.full(N, 3, np.uint64), np.arange(N)).numpy()
    assert np.abs(np.histogram(many, bins=10, range=(0, 1))[0] / N - 0.1).max() < 0.006
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02
