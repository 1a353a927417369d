"""Admission, data order and seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.errors import AgentRLError, ConfigError, DataError
from agentrl.rollout.gate import Gate, Stage
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.schedule import Place, Schedule, episode_seed, fingerprint, sampling_seed
from agentrl.testing.clock import run_virtual


def filled(batch: int, staleness: int) -> Gate:
    gate = Gate(batch=batch, staleness=staleness, concurrency=None, samples=2)
    for position in range(gate.limit):
        gate.enter(position)
    return gate


def test_nothing_leaks_when_groups_leave_early() -> None:
    gate = filled(8, 0)
    assert not gate.open
    gate.leave(3)
    assert gate.open
    gate.enter(8)
    for position in (0, 1, 2, 4, 5, 6, 7, 8):
        gate.pooled(position)
    assert not gate.open
    gate.taken([0, 1, 2, 4, 5, 6, 7, 8])
    assert str(gate) == "8 of 8 groups live (0 running, 0 in the pool, 8 taken)"
    for position in (0, 1, 2, 4, 5, 6, 7, 8):
        gate.leave(position)
    assert gate.live == 0


def test_the_waiter_is_woken_and_a_wait_ends() -> None:
    async def body() -> None:
        gate = filled(1, 1)
        assert not await gate.room(timeout=5.0)
        gate.pooled(0)
        gate.taken([0])
        gate.leave(0)
        assert await gate.room(timeout=5.0)

    run_virtual(body())


def test_concurrency_counts_running_episodes_only() -> None:
    gate = Gate(batch=8, staleness=0, concurrency=4, samples=4)
    gate.enter(0)
    assert not gate.open
    for _ in range(4):
        gate.episode_done(0)
    assert gate.open  # the group still runs, its episodes do not
    gate.pooled(0)
    for position in range(1, 8):
        gate.enter(position)
        gate.pooled(position)
    assert gate.count(Stage.POOLED) == 8
    with pytest.raises(ConfigError, match="no group could start"):
        Gate(batch=8, staleness=0, concurrency=3, samples=4)


def test_moves_that_cannot_be_are_refused() -> None:
    gate = filled(1, 0)
    with pytest.raises(AgentRLError, match="admitted although the gate is shut"):
        gate.enter(5)
    with pytest.raises(AgentRLError, match="group 0 is running and cannot go from in the pool to taken"):
        gate.taken([0])
    with pytest.raises(AgentRLError, match="group 9 is not live"):
        gate.leave(9)


def test_what_a_resume_finds_may_be_more_than_the_limit() -> None:
    gate = Gate(batch=4, staleness=2, concurrency=None, samples=1)
    gate.restore(range(30), [])
    assert gate.live == 30
    assert not gate.open


@given(n=st.integers(1, 40), seed=st.integers(0, 2**31), epochs=st.integers(1, 4))
def test_every_epoch_has_every_row_once(n: int, seed: int, epochs: int) -> None:
    schedule = Schedule(n, seed, epochs=epochs, shuffle=True)
    places = [schedule.place(position) for position in range(n * epochs)]
    for epoch in range(epochs):
        assert sorted(place.row for place in places if place.epoch == epoch) == list(range(n))
    with pytest.raises(IndexError):
        schedule.place(n * epochs)
    backwards = Schedule(n, seed, epochs=epochs, shuffle=True)
    assert [backwards.place(p) for p in reversed(range(n * epochs))][::-1] == places


def test_the_order_is_the_same_in_every_process() -> None:
    code = (
        "from agentrl.rollout.schedule import *; s = Schedule(9, 7, epochs=None, shuffle=True); "
        "print([s.place(i) for i in range(20)], episode_seed(1, Place(2, 3), 4), sampling_seed(1, Place(2, 3), 4, 5))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_seeds_differ_where_they_must() -> None:
    seeds = {episode_seed(r, Place(e, i), a) for r in range(3) for e in range(3) for i in range(3) for a in range(3)}
    assert len(seeds) == 81
    assert len({sampling_seed(1, Place(0, 0), 0, sample) for sample in range(16)}) == 16
    assert Schedule(50, 1, epochs=None, shuffle=True).place(0) != Schedule(50, 2, epochs=None, shuffle=True).place(0)
    assert [Schedule(5, 1, epochs=None, shuffle=False).place(i).row for i in range(7)] == [0, 1, 2, 3, 4, 0, 1]
    with pytest.raises(DataError, match="no rows"):
        Schedule(0, 1, epochs=None, shuffle=True)


def test_fingerprints_tell_data_apart() -> None:
    rows = [{"q": str(i)} for i in range(5000)]
    assert fingerprint(rows, 1, True) == fingerprint(list(rows), 1, True)
    assert len({fingerprint(rows, 1, True), fingerprint(rows[:-1], 1, True), fingerprint(rows, 2, True)}) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 7}, "concurrency 7 is less than the 8 episodes of one group"),
        ({"min_scored": 9}, "no group could count"),
        ({"samples": 1}, "set filter_equal = false"),
        ({"straggler_seconds": 700.0}, "has no effect beyond time_limit"),
        ({"straggler_seconds": 7.0, "min_scored": 8}, "has no effect: all 8 episodes are needed"),
        ({"stall_seconds": 10.0}, "must be more than time_limit"),
        ({"staleness": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutOptions.model_validate(settings)
