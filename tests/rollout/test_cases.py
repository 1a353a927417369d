"""Failures that users of other systems reported, as cases: cases/async_staleness.jsonl."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.errors import RunError
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.pool import Pool
from agentrl.rollout.runner import Runner
from agentrl.testing.clock import run_virtual
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.session import byte_sessions
from agentrl.types import Message, Row, Step, Stop, Version

CASES = {
    case["id"]: case
    for name in ("async_staleness", "zero3_resume")
    for case in map(json.loads, (Path(__file__).parents[1] / "cases" / f"{name}.jsonl").read_text().splitlines())
}


class Told(Env):
    """Earns what `earn` says for each sample in turn; None raises."""

    earn: Callable[[Row, int], Awaitable[float | None]]
    played = 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        return [{"role": "user", "content": "go"}], {}

    async def step(self, action: Message) -> Step:
        cls = type(self)
        number, cls.played = cls.played, cls.played + 1
        reward = await cls.earn(self.row, number)
        if reward is None:
            raise RuntimeError("this rollout failed")
        return Step([], reward, True, False, {})


def env_that(earn: Callable[[Row, int], Awaitable[float | None]]) -> type[Told]:
    return type("Env", (Told,), {"earn": staticmethod(earn), "played": 0})


def scripted(at: int = 0) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt: [65], delay=0.1, version=Version(1, at))


async def running(
    folder: Path,
    options: RolloutOptions,
    env: type[Env],
    body: Callable[[Runner], Awaitable[None]],
    *,
    engine: ScriptedEngine | None = None,
    rows: int = 64,
    cursor: Mapping[str, Any] | None = None,
) -> None:
    engine = engine or scripted()
    pool = await Pool.open(folder / "pool.sqlite")
    runner = Runner(
        options,
        pool=pool,
        rows=[{"n": n, "of": rows} for n in range(rows)],
        seed=1,
        env="told",
        make_env=env,
        make_agent=Agent,
        open_session=byte_sessions(engine),
    )
    await runner.start(engine.version, cursor)
    task = asyncio.create_task(runner.run())
    try:
        await body(runner)
    finally:
        task.cancel()
        await asyncio.wait([task])
        await pool.close()


def options_of(**settings: Any) -> RolloutOptions:
    return RolloutOptions.model_validate({"groups_per_step": 4, "samples": 2, "shuffle": False, **settings})


async def all_differ(row: Row, number: int) -> float:
    return float(number)


def test_e01_a_task_that_never_returns(tmp_path: Path) -> None:
    case = CASES["E01"]["input"]

    async def earn(row: Row, number: int) -> float:
        if row["n"] == 5 and number % 2:
            await asyncio.get_running_loop().create_future()
        return float(number % 2)

    async def body(runner: Runner) -> None:
        take = await runner.take(0, Version(1, 0), 60.0 + 5.0)
        assert take is not None
        assert len(take.groups) == case["groups_needed"]
        await asyncio.sleep(60.0)
        assert runner.metrics()["rollout_timeouts"] == 1

    options = options_of(groups_per_step=case["groups_needed"], staleness=1, time_limit=60.0)
    run_virtual(running(tmp_path, options, env_that(earn), body))


def test_e02_all_producers_died(tmp_path: Path) -> None:
    case = CASES["E02"]

    async def earn(row: Row, number: int) -> float:
        raise RuntimeError("engine down")

    async def body(runner: Runner) -> None:
        with pytest.raises(RunError, match=case["expected"]["cause_chained"]) as caught:
            await runner.take(0, Version(1, 0), 1000.0)
        assert asyncio.get_running_loop().time() < case["expected"]["trainer_raises_within_s"]
        assert str(caught.value.__cause__) == "engine down"

    run_virtual(running(tmp_path, options_of(groups_per_step=2, staleness=0), env_that(earn), body))


def test_e03_an_empty_pool_is_not_a_batch(tmp_path: Path) -> None:
    async def earn(row: Row, number: int) -> float:
        await asyncio.sleep(20.0)
        return float(number % 2)

    async def body(runner: Runner) -> None:
        batches = [await runner.take(0, Version(1, 0), 4.0) for _ in range(6)]
        assert [batch is None for batch in batches] == [True] * 5 + [False]
        assert asyncio.get_running_loop().time() < 21.0

    run_virtual(running(tmp_path, options_of(groups_per_step=1), env_that(earn), body))


def test_e05_admission_after_a_resume(tmp_path: Path) -> None:
    case = CASES["E05"]
    size, staleness, at = (case["input"][key] for key in ("batch_size", "max_staleness", "resumed_version"))
    engine = scripted(at)

    async def body(runner: Runner) -> None:
        for step in range(5):
            await asyncio.sleep(10.0)  # rollouts are far faster than the trainer
            assert runner.gate.live <= case["expected"]["max_in_flight_plus_buffered"]
            version = Version(1, at + step)
            take = await runner.take(at + step, version, 10.0)
            assert take is not None
            assert all(version.number - (g.oldest_version or 0) <= staleness for g in take.groups)
            engine.set_version(Version(1, at + step + 1))
            await runner.published(engine.version)

    options = options_of(groups_per_step=size, staleness=staleness)
    run_virtual(running(tmp_path, options, env_that(all_differ), body, engine=engine))


def test_e07_workers_start_at_the_resumed_version(tmp_path: Path) -> None:
    case = CASES["E07"]["input"]

    async def body(runner: Runner) -> None:
        assert await runner.take(case["resume_step"], Version(1, case["resume_step"]), 10.0) is not None
        assert runner.counts["dropped"] == 0

    options = options_of(staleness=case["max_staleness"])
    run_virtual(running(tmp_path, options, env_that(all_differ), body, engine=scripted(case["resume_step"])))


def test_e11_no_group_has_signal(tmp_path: Path) -> None:
    rewards = CASES["E11"]["input"]["all_groups_rewards"]

    async def earn(row: Row, number: int) -> float:
        return float(rewards[number % len(rewards)])

    async def body(runner: Runner) -> None:
        with pytest.raises(RunError, match="all rewards equal"):
            await runner.take(0, Version(1, 0), 1000.0)

    run_virtual(running(tmp_path, options_of(samples=len(rewards), max_filtered=40), env_that(earn), body))


def test_e12_one_of_four_fails(tmp_path: Path) -> None:
    case = CASES["E12"]

    async def earn(row: Row, number: int) -> float | None:
        reward: float | None = case["input"]["rewards"][number % 4]
        return reward

    async def body(runner: Runner) -> None:
        take = await runner.take(0, Version(1, 0), 10.0)
        assert take is not None
        assert [e.reward for e in take.groups[0].episodes if e.scored] == case["expected"]["advantages_over"]

    run_virtual(running(tmp_path, options_of(groups_per_step=1, samples=4, concurrency=4), env_that(earn), body))


def test_e15_what_failed_before_the_first_call_adds_nothing(tmp_path: Path) -> None:
    class FailsEarly(Told):
        made = 0

        async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
            FailsEarly.made += 1
            if FailsEarly.made == 2:
                raise RuntimeError("before the first model call")
            return await super().reset()

        async def step(self, action: Message) -> Step:
            FailsEarly.played += 1
            return Step([], float(FailsEarly.played % 2), True, False, {})

    async def body(runner: Runner) -> None:
        take = await runner.take(0, Version(1, 0), 10.0)
        assert take is not None
        (failed,) = [e for e in take.groups[0].episodes if e.stop is Stop.ENV_ERROR]
        assert failed.trajectories == ()
        assert failed.turns == ()
        assert not failed.scored

    run_virtual(running(tmp_path, options_of(groups_per_step=1, samples=4), FailsEarly, body))


def seven_steps(folder: Path, saved: dict[str, Any]) -> Mapping[str, Any]:
    """The saved run: as many steps and rows as the case says; the cursor of its checkpoint."""
    cursors: list[Mapping[str, Any]] = []
    engine = scripted()
    batch = saved["rows_used"] // saved.get("step", 7)

    async def body(runner: Runner) -> None:
        for step in range(saved.get("step", 7)):
            take = await runner.take(step, Version(1, step), 100.0)
            assert take is not None
            cursors.append(take.cursor)
            engine.set_version(Version(1, step + 1))
            await runner.published(engine.version)

    options = options_of(groups_per_step=batch, staleness=0)
    run_virtual(running(folder, options, env_that(all_differ), body, engine=engine))
    return cursors[-1]


@pytest.mark.parametrize(("rows", "first"), [(64, 56), (40, 0)])
def test_g11_g15_the_data_goes_on_and_other_data_begins_at_its_first_row(tmp_path: Path, rows: int, first: int) -> None:
    went_on, other = CASES["G11"], CASES["G15"]["input"]
    assert went_on["expected"]["next_row"] == other["rows_used"] == 56
    cursor = seven_steps(tmp_path, went_on["input"]["saved"])
    engine = scripted()
    engine.set_version(Version(2, went_on["expected"]["version"]))
    played: list[tuple[int, int]] = []

    async def earn(row: Row, number: int) -> float:
        played.append((row["of"], row["n"]))
        return float(number)

    async def body(runner: Runner) -> None:
        assert await runner.take(7, engine.version, 10.0) is not None
        # What the first life had already played ahead of the checkpoint is kept, and not played again.
        assert played[0] == (rows, first)
        assert (runner.data_start > 0) == (rows == other.get("rows", 40))

    options = options_of(groups_per_step=8, staleness=0)
    run_virtual(running(tmp_path, options, env_that(earn), body, engine=engine, rows=rows, cursor=cursor))
