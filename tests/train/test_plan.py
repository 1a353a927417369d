"""Every rank computes the same plan, does the same number of passes, and nothing is lost or doubled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.manifest import EpisodeEntry, GroupEntry, Manifest, TrajectoryEntry
from agentrl.train.plan import Item, make_plan
from agentrl.types import Version


def manifest(groups: list[list[list[int]]]) -> Manifest:
    """Lengths by group, episode and trajectory."""
    return Manifest(
        1,
        1,
        Version(1, 0),
        {},
        tuple(
            GroupEntry(
                i,
                "test",
                tuple(
                    EpisodeEntry(s, 1.0, "finished", (), tuple(TrajectoryEntry(n, n - 1, False) for n in lengths))
                    for s, lengths in enumerate(group)
                ),
            )
            for i, group in enumerate(groups)
        ),
    )


lengths = st.lists(st.lists(st.lists(st.integers(2, 60), max_size=3), min_size=1, max_size=4), min_size=1, max_size=8)


@given(lengths, st.integers(1, 5), st.integers(1, 4), st.integers(2, 100))
def test_plan(groups: list[list[list[int]]], ranks: int, minibatches: int, budget: int) -> None:
    plan = make_plan(manifest(groups), ranks=ranks, minibatches=minibatches, budget=budget, longest=50)
    everything = [
        Item(g, e, t, n)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group)
        for t, n in enumerate(episode)
    ]
    planned = [item for minibatch in plan.passes for rank in minibatch for p in rank for item in p]
    assert sorted(planned) == sorted(i for i in everything if i.length <= 50)
    assert plan.overlong == sum(i.length > 50 for i in everything)
    assert len(plan.passes) == minibatches
    for minibatch in plan.passes:
        assert len(minibatch) == ranks
        assert len({len(rank) for rank in minibatch}) == 1, "ranks differ in their number of passes"
        assert len(minibatch[0]) >= 1
        for p in (p for rank in minibatch for p in rank):
            assert sum(i.length for i in p) <= budget or len(p) == 1
    # A group never straddles minibatches: its baseline and its episodes' denominators are one step's.
    homes = [{item.group for rank in m for p in rank for item in p} for m in plan.passes]
    assert sum(map(len, homes)) == len(set().union(*homes))


@pytest.mark.parametrize("ranks", [1, 2])
def test_fill_of_log_normal_lengths(ranks: int) -> None:
    rng = np.random.default_rng(0)
    draws = np.exp(rng.normal(size=512) - 0.5) * 1000  # mean 1k, sigma 1
    groups = [[[int(np.clip(n, 2, 8192))] for n in draws[at : at + 8]] for at in range(0, 512, 8)]
    plan = make_plan(manifest(groups), ranks=ranks, minibatches=1, budget=8192, longest=None)
    assert plan.fill >= 0.97
    loads = [sum(i.length for p in rank for i in p) for rank in plan.passes[0]]
    assert max(loads) <= 1.02 * min(loads)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_lies_in_one_pass_where_there_is_room(ranks: int) -> None:
    groups = [[[60 + 3 * ((5 * g + s) % 4)] for s in range(8)] for g in range(8)]
    plan = make_plan(manifest(groups), ranks=ranks, minibatches=1, budget=2200, longest=None)
    passes = [p for rank in plan.passes[0] for p in rank]
    assert len(passes) == 2
    assert sum(len({item.group for item in p}) for p in passes) == len(groups)


def test_unscored_abandoned_and_empty_trajectories_are_left_out() -> None:
    entries = (TrajectoryEntry(9, 4, False), TrajectoryEntry(9, 4, True), TrajectoryEntry(9, 0, False))
    group = GroupEntry(
        0,
        "test",
        (EpisodeEntry(0, 1.0, "finished", (), entries), EpisodeEntry(1, None, "engine_lost", (), entries)),
    )
    plan = make_plan(Manifest(1, 1, Version(1, 0), {}, (group,)), ranks=1, minibatches=1, budget=64, longest=None)
    assert plan.passes == ((((Item(0, 0, 0, 9),),),),)
