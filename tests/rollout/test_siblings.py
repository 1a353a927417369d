"""Siblings that we made up for the kinds of cases/async_staleness.jsonl: the same fault by another way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import Agent
from agentrl.errors import RunError
from agentrl.rollout.pool import Pool
from agentrl.rollout.records import Candidate, TakeRule, choose
from agentrl.rollout.runner import Runner
from agentrl.testing.clock import run_virtual
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.session import byte_sessions
from agentrl.types import Message, Row, Step, Stop, Version
from tests.rollout.test_cases import CASES, Told, all_differ, env_that, options_of, running, scripted


def rule(staleness: int, **settings: Any) -> TakeRule:
    return TakeRule(**{"batch": 1, "staleness": staleness, "wait": True, "max_asks": 9, **settings})


def test_e09_the_edge_of_the_bound_counts_time_in_the_queue(tmp_path: Path) -> None:
    case = CASES["E09"]
    bound, made, trained = (case["input"][key] for key in ("max_staleness", "generated_at", "trained_at"))
    # All are finished at version 5 and wait in the pool; only when they are taken differs.
    for start, at, accepted in zip(made, trained, case["expected"]["accepted"], strict=True):
        folder = tmp_path / str(at)
        engine = scripted(start)

        async def body(
            runner: Runner, at: int = at, accepted: bool = accepted, engine: ScriptedEngine = engine
        ) -> None:
            await asyncio.sleep(5.0)
            assert runner.gate.live == bound + 1
            engine.set_version(Version(1, at))
            await runner.published(engine.version)
            take = await runner.take(at, engine.version, 60.0)
            assert take is not None
            ages = {at - (group.oldest_version or 0) for group in take.groups}
            assert max(ages) <= bound
            assert (runner.counts["dropped"] == 0) is accepted

        options = options_of(groups_per_step=1, staleness=bound)
        run_virtual(running(folder, options, env_that(all_differ), body, engine=engine))


@pytest.mark.parametrize(
    ("staleness", "oldest", "number", "taken"),
    [(0, 7, 7, True), (2, 7, 9, True), (4, None, 99, True)],
)
def test_the_youngest_version_that_may_still_be_taken(
    staleness: int, oldest: int | None, number: int, taken: bool
) -> None:
    assert bool(choose([Candidate(3, oldest)], number, rule(staleness))) is taken


def test_an_urgent_group_goes_before_one_that_finished_earlier() -> None:
    pooled = [Candidate(1, 8), Candidate(2, 6), Candidate(3, None)]
    assert choose(pooled, 8, rule(2, batch=2)) == [2, 1]


def test_an_environment_that_never_closes_does_not_hold_the_batch(tmp_path: Path) -> None:
    """A sibling of E01: what never returns is the clean-up."""

    class NeverCloses(Told):
        @staticmethod
        async def earn(row: Row, number: int) -> float:
            return float(number % 2)

        async def close(self) -> None:
            await asyncio.get_running_loop().create_future()

    async def body(runner: Runner) -> None:
        take = await runner.take(0, Version(1, 0), 60.0)
        assert take is not None
        assert all(episode.metrics["close_failed"] for group in take.groups for episode in group.episodes)
        assert asyncio.get_running_loop().time() < 30.0

    run_virtual(running(tmp_path, options_of(close_seconds=2.0), NeverCloses, body))


def test_producers_that_die_one_after_the_other(tmp_path: Path) -> None:
    """A sibling of E02: not at once, but for good; what was finished before is still delivered."""
    good = 8

    async def earn(row: Row, number: int) -> float:
        if number >= good:
            raise ConnectionError("the tool server is gone")
        return float(number)

    async def body(runner: Runner) -> None:
        for step in range(2):
            assert await runner.take(step, Version(1, step), 100.0) is not None
            await runner.published(Version(1, step + 1))
        with pytest.raises(RunError, match="the tool server is gone"):
            await runner.take(2, Version(1, 2), 1000.0)

    options = options_of(groups_per_step=2, staleness=1, max_failed=4)
    run_virtual(running(tmp_path, options, env_that(earn), body))


def test_groups_without_any_verdict_are_no_signal_either(tmp_path: Path) -> None:
    """A sibling of E11: no reward is equal to another, because there is none."""

    class Judged(Told):
        async def step(self, action: Message) -> Step:
            return Step([], None, True, False, {})

    async def body(runner: Runner) -> None:
        with pytest.raises(RunError, match="groups in a row failed"):
            await runner.take(0, Version(1, 0), 1000.0)
        assert runner.counts["given_up"] >= 5
        assert runner.counts["filtered"] == 0

    run_virtual(running(tmp_path, options_of(max_failed=5), Judged, body))


def test_what_failed_after_the_first_call_keeps_its_tokens_out_of_the_loss(tmp_path: Path) -> None:
    """A sibling of E15: tokens were sampled, then the environment broke."""
    played = 0

    async def earn(row: Row, number: int) -> float | None:
        nonlocal played
        played += 1
        return None if played == 2 else float(played)

    async def body(runner: Runner) -> None:
        take = await runner.take(0, Version(1, 0), 10.0)
        assert take is not None
        (failed,) = [e for e in take.groups[0].episodes if e.stop is Stop.ENV_ERROR]
        assert not failed.scored
        assert failed.reward is None
        assert sum(int(t.loss_mask.sum()) for t in failed.trajectories) > 0, "they stay to be looked at"
        assert take.groups[0].oldest_version == 0
        assert len([e for e in take.groups[0].episodes if e.scored]) == 3

    run_virtual(running(tmp_path, options_of(groups_per_step=1, samples=4, concurrency=4), env_that(earn), body))


def test_an_error_that_is_no_text_costs_its_episodes_alone(tmp_path: Path) -> None:
    """A sibling of I10: the names of files may hold bytes that no database and no JSON takes."""

    async def earn(row: Row, number: int) -> float:
        if row["n"] == 1 or number % 4 == 3:
            raise FileNotFoundError("no file '\udcff.txt'")
        return float(number)

    async def body(runner: Runner) -> None:
        take = await runner.take(0, Version(1, 0), 60.0)
        assert take is not None
        errors = [e.error for group in take.groups for e in group.episodes if e.error]
        assert errors
        assert all("no file '\\udcff.txt'" in error for error in errors)
        assert runner.counts["given_up"] == 1

    run_virtual(running(tmp_path, options_of(samples=4, concurrency=4), env_that(earn), body))


@pytest.mark.parametrize(
    "odd", [2**70, "\ud800", {"\ud800": [-(2**70)]}, {(1, 2): {"b", "a"}}, 10**6000], ids=lambda odd: type(odd).__name__
)
def test_what_json_cannot_say_is_still_a_row(odd: object, tmp_path: Path) -> None:
    async def body() -> None:
        pool = await Pool.open(tmp_path / "pool.sqlite")
        engine = scripted()
        runner = Runner(
            options_of(), pool=pool, rows=[{"odd": odd}] * 8, seed=1, env="told", make_env=env_that(all_differ),
            make_agent=Agent, open_session=byte_sessions(engine),
        )  # fmt: skip
        await runner.start(engine.version)
        streaming = asyncio.create_task(runner.run())
        take = await runner.take(0, engine.version, 60.0)
        assert take is not None
        assert "odd" in (await pool.group(take.ids[0])).episodes[0].row
        streaming.cancel()
        await asyncio.wait([streaming])
        await pool.close()

    run_virtual(body())


def test_the_same_rows_are_the_same_data_in_another_process() -> None:
    code = (
        "from agentrl.rollout.schedule import fingerprint\n"
        "rows = [{'tags': {'a', 'b', 'c'}, 'image': object()}, {'n': {2**70: 'x'}}]\n"
        "print(fingerprint(rows, 1, True))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_groups_that_grow_too_old_at_the_end_of_the_rows_make_no_short_batch(tmp_path: Path) -> None:
    """A sibling of E09: half of the last batch has just gone, to be asked again; it is waited for."""
    engine = scripted()

    async def earn(row: Row, number: int) -> float:
        await asyncio.sleep(7.0)
        return float(number)

    async def body(runner: Runner) -> None:
        await asyncio.sleep(5.0)
        engine.set_version(Version(1, 1))
        await runner.published(engine.version)  # three groups are of version 0, the next three of version 1
        await asyncio.sleep(60.0)
        assert runner.exhausted
        engine.set_version(Version(1, 3))
        await runner.published(engine.version)
        take = await runner.take(3, engine.version, 60.0)
        assert take is not None
        assert len(take.ids) == 6
        assert runner.counts["dropped"] == 3
        assert await runner.take(4, engine.version, 60.0) is None
        assert runner.over

    options = options_of(groups_per_step=6, staleness=2, epochs=1, concurrency=6)
    run_virtual(running(tmp_path, options, env_that(earn), body, engine=engine, rows=6))


def test_a_row_filtered_by_weights_that_a_resume_abandoned_meanwhile_is_asked_again(tmp_path: Path) -> None:
    """A sibling of E07: the group ran across the resume, and all its rewards are equal."""
    engine = scripted(3)

    async def earn(row: Row, number: int) -> float:
        await asyncio.sleep(5.0)
        return float(number) if number > 1 else 1.0

    async def body(runner: Runner) -> None:
        await asyncio.sleep(2.0)  # it has tokens of version 1.3
        engine.set_version(Version(2, 0))
        await runner.start(engine.version)
        take = await runner.take(0, engine.version, 60.0)
        assert take is not None
        assert take.ids == (0,)
        assert runner.counts["filtered"] == 0
        assert runner.counts["abandoned"] == 1

    options = options_of(groups_per_step=1, staleness=0)
    run_virtual(running(tmp_path, options, env_that(earn), body, engine=engine))
