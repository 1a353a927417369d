"""Credit: rewards of turns, group baselines and generalised advantages against numpy and exact enumeration."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train import functional as F
from agentrl.train.credit import group_credit, turn_rewards
from agentrl.train.manifest import EpisodeEntry, GroupEntry, TrajectoryEntry, TurnMark
from agentrl.train.options import AlgorithmOptions


def entry(*rewards: float | None, sampled: int = 10, stop: str = "finished") -> EpisodeEntry:
    total = None if None in rewards else sum(r or 0.0 for r in rewards)
    turns = tuple(TurnMark(i, 0, i + 1, r, "") for i, r in enumerate(rewards))
    return EpisodeEntry(0, total, stop, turns, (TrajectoryEntry(2 * sampled, sampled, False),))


def group(*episodes: EpisodeEntry) -> GroupEntry:
    return GroupEntry(0, "test", episodes)


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=12),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_gae_oracle(rewards: list[float], discount: float, trace: float, seed: int) -> None:
    n = len(rewards)
    values = np.random.default_rng(seed).normal(size=n)
    deltas = np.array(rewards) + discount * np.append(values[1:], 0) - values
    expected = [sum((discount * trace) ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)]
    np.testing.assert_allclose(F.gae(rewards, values.tolist(), discount, trace), expected, atol=1e-9)


def test_gae_at_its_ends() -> None:
    """λ = 1 is return minus value; λ = 0 is the one-step error."""
    rewards, values = [0.0, 1.0, 2.0], [0.5, 1.0, -1.0]
    assert F.gae(rewards, values, 1.0, 1.0) == pytest.approx([2.5, 2.0, 3.0])
    assert F.gae(rewards, values, 1.0, 0.0) == pytest.approx([0.5, -1.0, 3.0])


def test_a_turns_reward_is_scaled_then_clipped_and_length_is_paid_for_at_the_end() -> None:
    options = AlgorithmOptions(
        reward_scale=2.0, reward_clip=1.5, overlong_tokens=100, overlong_buffer=20, overlong_penalty=0.5
    )
    assert turn_rewards(entry(0.5, 1.0, -9.0), options) == {0: 1.0, 1: 1.5, 2: -1.5}
    for sampled, penalty in ((80, 0.0), (90, -0.25), (100, -0.5), (5000, -0.5)):
        assert turn_rewards(entry(0.5, 0.0, sampled=sampled), options) == pytest.approx({0: 1.0, 1: penalty})


def test_marks_of_one_action_add_up() -> None:
    marks = (TurnMark(0, 0, 3, 0.0, "a"), TurnMark(0, 1, 4, 0.25, "b"), TurnMark(1, 0, 8, 1.0, "a"))
    assert turn_rewards(EpisodeEntry(0, 1.25, "finished", marks, ()), AlgorithmOptions()) == {0: 0.25, 1: 1.0}


def test_a_step_up_from_overlong_has_no_buffer() -> None:
    assert [F.overlong_penalty(n, 10, 0, 1.0) for n in (9, 10, 11)] == [0, 0, -1]


def test_turn_credit_by_hand() -> None:
    """The second turn of the first episode against the 0 that the second episode earned after its end."""
    options = AlgorithmOptions(name="rloo", credit="turn", discount=0.5)
    found = group_credit(group(entry(1.0, 2.0), entry(3.0), entry(None, None)), options)
    assert found == [{0: -1.0, 1: 2.0}, {0: 1.0}, {}]


@given(
    st.lists(st.none() | st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=6),
    st.sampled_from(["group_std", "group_mean", "leave_one_out", "none"]),
)
def test_turn_advantages_oracle(
    episodes: list[list[float] | None], baseline: Literal["group_std", "group_mean", "leave_one_out", "none"]
) -> None:
    returns = [None if e is None else dict(enumerate(e)) for e in episodes]
    known = [e for e in episodes if e is not None]
    width = max((len(e) for e in known), default=0)
    table = np.array([e + [0.0] * (width - len(e)) for e in known]).reshape(len(known), width)
    n = len(known)
    if n < 2 and baseline != "none":
        expected = np.zeros_like(table)
    elif baseline == "none":
        expected = table
    elif baseline == "leave_one_out":
        expected = np.array([table[i] - np.delete(table, i, 0).mean(0) for i in range(n)])
    else:
        expected = table - table.mean(0)
        if baseline == "group_std":
            expected = expected / (math.sqrt(table.var(0, ddof=1).mean()) + 1e-6)
    rows = iter(expected)
    for found, episode in zip(F.turn_advantages(returns, baseline), episodes, strict=True):
        if episode is None:
            assert found == {}
        else:
            np.testing.assert_allclose(list(found.values()), next(rows)[: len(episode)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rewards", [[1e200, -1e200, 0.0], [1e-200, 0.0, 0.0], [0.1 + 0.2, 0.3, 0.3], [1e16, 1e16 + 2]])
def test_rewards_of_any_size_have_finite_advantages(rewards: list[float]) -> None:
    for baseline in ("group_std", "group_mean", "leave_one_out"):
        found = F.group_advantages(rewards, baseline)
        by_turn = F.turn_advantages([{0: r} for r in rewards], baseline)
        assert all(math.isfinite(a) for a in found)
        assert all(math.isfinite(a[0]) for a in by_turn)
        if baseline == "group_std":
            assert max(map(abs, found)) < 2


def test_turn_credit_with_one_turn_is_group_credit() -> None:
    episodes = [entry(r) for r in (0.0, 1.0, 0.5, 2.0)]
    for name, more in (("grpo", {}), ("rloo", {}), ("dr_grpo", {"fixed_length": 4})):
        by_turn = group_credit(group(*episodes), AlgorithmOptions(name=name, credit="turn", **more))
        whole = group_credit(group(*episodes), AlgorithmOptions(name=name, **more))
        for a, b in zip(by_turn, whole, strict=True):
            assert a == pytest.approx(b, rel=1e-5)


OUTCOMES: list[tuple[tuple[int, ...], list[float]]] = [((1,), [0.3]), ((0, 0), [0.1, 1.0]), ((0, 1), [0.1, -2.0])]
"""Actions and rewards: the episode ends after the first turn or after the second."""


def chances(theta: np.ndarray[Any, Any]) -> list[tuple[float, np.ndarray[Any, Any]]]:
    """Of each outcome: its probability, and ∂ log π of each of its turns `[turns, 2]`."""
    p = 1 / (1 + np.exp(-theta))
    found = []
    for actions, _ in OUTCOMES:
        chance = math.prod(p[t] if a else 1 - p[t] for t, a in enumerate(actions))
        score = np.zeros((len(actions), 2))
        for t, a in enumerate(actions):
            score[t, t] = a - p[t]
        found.append((chance, score))
    return found


@pytest.mark.parametrize("credit", ["episode", "turn"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_gradient_is_unbiased_over_turns_of_different_number(credit: str, size: int) -> None:
    """The expectation over all groups that can happen, against the gradient of the expected return."""
    theta = np.array([0.4, -0.7])
    outcomes = chances(theta)
    true = sum(p * sum(rewards) * score.sum(0) for (p, score), (_, rewards) in zip(outcomes, OUTCOMES, strict=True))
    for name, factor in (("rloo", 1.0), ("dr_grpo", size / (size - 1))):
        more = {"fixed_length": 1} if name == "dr_grpo" else {}
        options = AlgorithmOptions.model_validate({"name": name, "credit": credit, **more})
        expected = np.zeros(2)
        for choice in itertools.product(range(3), repeat=size):
            advantages = group_credit(group(*(entry(*OUTCOMES[i][1]) for i in choice)), options)
            gradient = sum(a[t] * outcomes[i][1][t] for i, a in zip(choice, advantages, strict=True) for t in sorted(a))
            expected += math.prod(outcomes[i][0] for i in choice) * gradient / size
        np.testing.assert_allclose(expected * factor, true, atol=1e-12)


def test_agents_share_the_rewards_or_each_has_its_own() -> None:
    def deal(buyer: float, seller: float) -> EpisodeEntry:
        turns = tuple(
            TurnMark(i, i % 2, i + 1, reward, ("buyer", "seller")[i % 2])
            for i, reward in enumerate((0.0, 0.0, buyer, seller))
        )
        return EpisodeEntry(0, buyer + seller, "finished", turns, (TrajectoryEntry(9, 5, False),) * 2)

    deals = group(deal(0.8, 0.2), deal(0.4, 0.6))
    together = group_credit(deals, AlgorithmOptions(baseline="group_mean"))
    assert together == [dict.fromkeys(range(4), pytest.approx(0.0))] * 2
    each = group_credit(deals, AlgorithmOptions(baseline="group_mean", agents="each"))
    assert [episode[2] for episode in each] == pytest.approx([0.2, -0.2])
    assert [episode[3] for episode in each] == pytest.approx([-0.2, 0.2])
    assert [episode[0] for episode in each] == pytest.approx([0.2, -0.2])
    assert sorted(each[0]) == [0, 1, 2, 3]


def test_an_agent_that_never_acted_is_in_no_baseline_of_its_own() -> None:
    both = EpisodeEntry(
        0, 1.0, "finished", (TurnMark(0, 0, 1, 0.0, "a"), TurnMark(1, 1, 1, 1.0, "b")), (TrajectoryEntry(3, 1, False),)
    )
    alone = EpisodeEntry(1, 0.5, "finished", (TurnMark(0, 0, 1, 0.5, "a"),), (TrajectoryEntry(3, 1, False),))
    found = group_credit(group(both, alone), AlgorithmOptions(baseline="group_mean", agents="each"))
    assert found == [{0: pytest.approx(-0.25), 1: pytest.approx(0.0)}, {0: pytest.approx(0.25)}]
