"""The runner on a virtual clock: streaming, failures, stragglers, stalls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.errors import EngineError, RunError
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.pool import Pool
from agentrl.rollout.runner import Runner
from agentrl.testing.clock import run_virtual
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.session import byte_sessions
from agentrl.types import Group, Message, Row, Step, Stop, Version


class Scripted(Env):
    """Plays what its row says: `rewards` by sample in turn, `delay` seconds a step."""

    played = 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        return [{"role": "user", "content": "go"}], {}

    async def step(self, action: Message) -> Step:
        await asyncio.sleep(self.row.get("delay", 0.0))
        rewards = self.row["rewards"]
        reward = rewards.pop(0)
        rewards.append(reward)
        return Step([], reward, True, False, {})


class Shared(list[float | None]):
    """The row of each environment is a copy; what its samples earn in turn is one list."""

    def __deepcopy__(self, memo: object) -> Shared:
        return self


def rows_of(*rewards: float | None, n: int = 8) -> list[Row]:
    return [{"rewards": Shared(rewards)} for _ in range(n)]


async def with_runner(
    path: Path,
    options: RolloutOptions,
    rows: list[Row],
    body: Callable[[Runner, ScriptedEngine], Awaitable[None]],
    *,
    env: type[Env] = Scripted,
    agent: type[Agent] = Agent,
    engine: ScriptedEngine | None = None,
    groups: list[tuple[Group, str]] | None = None,
) -> None:
    engine = engine or ScriptedEngine(lambda prompt: [65, 66, 67], delay=1.0)
    pool = await Pool.open(path / "pool.sqlite")
    runner = Runner(
        options,
        pool=pool,
        rows=rows,
        seed=7,
        env="scripted",
        make_env=env,
        make_agent=agent,
        open_session=byte_sessions(engine),
        on_group=None if groups is None else lambda group, fate: groups.append((group, fate)),
    )
    await runner.start(Version(1, 0))
    task = asyncio.create_task(runner.run())
    try:
        await body(runner, engine)
    finally:
        task.cancel()
        await asyncio.wait([task])
        await pool.close()


async def train(runner: Runner, engine: ScriptedEngine, steps: int, seconds: float = 1.0) -> list[list[int]]:
    """A trainer: takes, works, publishes; the ids of each step's groups."""
    taken = []
    for step in range(steps):
        version = Version(1, step)
        take = await runner.take(step, version, 1000.0)
        assert take is not None
        for group in take.groups:
            assert group.oldest_version is not None
            assert step - group.oldest_version <= runner.options.staleness
        taken.append([group.id for group in take.groups])
        await asyncio.sleep(seconds)
        engine.set_version(Version(1, step + 1))
        await runner.published(Version(1, step + 1))
    return taken


@pytest.mark.parametrize("policy", ["wait", "drop"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_streams_batches_within_the_bound(tmp_path: Path, staleness: int, policy: str) -> None:
    options = RolloutOptions.model_validate(
        {"groups_per_step": 4, "samples": 2, "staleness": staleness, "when_stale": policy}
    )

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        taken = await train(runner, engine, 10)
        assert len({position for step in taken for position in step}) == 40

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0), body))


def test_one_filtered_group_does_not_stop_a_synchronous_run(tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=8, samples=2, staleness=0, shuffle=False)
    rows = rows_of(0.0, 1.0, n=16)
    rows[3] = {"rewards": Shared([1.0, 1.0])}
    groups: list[tuple[Group, str]] = []

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        taken = await train(runner, engine, 1)
        assert taken == [[0, 1, 2, 4, 5, 6, 7, 8]]
        assert [group.id for group, fate in groups if fate == "filtered"] == [3]

    run_virtual(with_runner(tmp_path, options, rows, body, groups=groups))


def test_a_skipped_step_makes_room_for_the_next(tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=4, samples=2, staleness=0)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        first = await runner.take(0, Version(1, 0), 100.0)
        again = await runner.take(0, Version(1, 0), 100.0)
        second = await runner.take(1, Version(1, 0), 100.0)  # the same weights: step 0 made none
        assert first is not None
        assert second is not None
        assert again == first
        assert (first.id, second.id) == (1, 2)
        assert not {g.id for g in first.groups} & {g.id for g in second.groups}

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0), body))


def test_a_publish_after_the_end_begins_nothing(tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=4, samples=2, staleness=0)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        assert await runner.take(0, Version(1, 0), 100.0) is not None
        (streaming,) = (t for t in asyncio.all_tasks() if getattr(t.get_coro(), "__qualname__", "") == "Runner.run")
        streaming.cancel()
        await asyncio.wait([streaming])
        asked = len(engine.requests)
        await runner.published(Version(1, 1))
        await asyncio.sleep(1.0)
        assert (runner.gate.live, len(engine.requests)) == (0, asked)

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0), body))


def test_a_publish_asks_the_next_rows_at_once_and_its_books_follow(tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=4, samples=2, staleness=0)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        assert await runner.take(0, Version(1, 0), 100.0) is not None
        assert not runner.gate.open
        engine.set_version(Version(1, 1))
        publishing = asyncio.create_task(runner.published(Version(1, 1)))
        asked = len(engine.requests)
        while not publishing.done():
            await asyncio.sleep(0)
            if runner.gate.live == 1:
                break
        assert not publishing.done(), "the next group began after the durable write"
        await publishing
        await asyncio.sleep(0.1)
        assert len(engine.requests) == asked + 8

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0), body))


def test_the_last_batch_may_be_short_and_then_it_is_over(tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=4, samples=2, staleness=4, epochs=1)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        taken = await train(runner, engine, 2)
        assert [len(step) for step in taken] == [4, 2]
        assert runner.over
        assert await runner.take(2, Version(1, 2), 5.0) is None

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0, n=6), body))


def test_a_straggler_is_cut_off(tmp_path: Path) -> None:
    class Slow(Scripted):
        async def step(self, action: Message) -> Step:
            step = await super().step(action)
            if step.reward == 0.5:
                await asyncio.sleep(400.0)
            return step

    options = RolloutOptions(groups_per_step=1, samples=4, staleness=0, straggler_seconds=10.0, min_scored=2)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        take = await runner.take(0, Version(1, 0), 30.0)
        assert take is not None
        assert sorted(e.stop for e in take.groups[0].episodes) == [Stop.CANCELLED] + [Stop.FINISHED] * 3

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0, 0.5, 1.0, n=1), body, env=Slow))


def test_oversampling_takes_the_first_to_finish(tmp_path: Path) -> None:
    class OneIsSlow(Agent):
        made = 0

        async def act(self, observation: list[Message], client: Any) -> Message:
            OneIsSlow.made += 1
            if OneIsSlow.made % 3 == 0:
                await asyncio.sleep(300.0)
            return await super().act(observation, client)

    options = RolloutOptions(groups_per_step=1, samples=2, extra_samples=1, staleness=0)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        take = await runner.take(0, Version(1, 0), 30.0)
        assert take is not None
        assert sum(e.scored for e in take.groups[0].episodes) == 2

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0, n=1), body, agent=OneIsSlow))


class DeadEngine(ScriptedEngine):
    async def generate(self, request: Any, on_tokens: Any = None) -> Any:
        raise EngineError("engine down")


def test_a_lost_engine_is_retried_with_the_same_seed(tmp_path: Path) -> None:
    class Flaky(ScriptedEngine):
        async def generate(self, request: Any, on_tokens: Any = None) -> Any:
            completion = await super().generate(request, on_tokens)
            if len(self.requests) <= 2:
                raise EngineError("lost")
            return completion

    flaky = Flaky(lambda prompt: [65])
    options = RolloutOptions(groups_per_step=1, samples=2, staleness=0)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        take = await runner.take(0, Version(1, 0), 30.0)
        assert take is not None
        assert [e.stop for e in take.groups[0].episodes] == [Stop.FINISHED] * 2
        assert sorted(r.sampling.seed or 0 for r in flaky.requests[:2]) == sorted(
            r.sampling.seed or 0 for r in flaky.requests[2:4]
        )
        assert len({r.id for r in flaky.requests}) == len(flaky.requests)

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0, n=1), body, engine=flaky))


def test_dead_producers_end_the_run_with_the_cause(tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=2, samples=2, staleness=1)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RunError, match="engine down") as caught:
            await runner.take(0, Version(1, 0), 1000.0)
        assert loop.time() < 30.0
        assert isinstance(caught.value.__cause__, EngineError)

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0), body, engine=DeadEngine(lambda p: [1])))


def test_equal_rewards_for_ever_end_the_run(tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=2, samples=4, staleness=1, max_filtered=20)

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        with pytest.raises(RunError, match="20 groups in a row had all rewards equal"):
            await runner.take(0, Version(1, 0), 1000.0)

    run_virtual(with_runner(tmp_path, options, rows_of(1.0, 1.0, 1.0, 1.0), body))


def test_a_task_that_never_returns_costs_only_itself(tmp_path: Path) -> None:
    class Stuck(Scripted):
        async def step(self, action: Message) -> Step:
            if self.row.get("stuck"):
                await asyncio.get_running_loop().create_future()
            return await super().step(action)

    options = RolloutOptions(groups_per_step=7, samples=2, staleness=1, time_limit=50.0, shuffle=False, epochs=1)
    rows = rows_of(0.0, 1.0)
    rows[2] = {"rewards": Shared([0.0, 1.0]), "stuck": True}

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        take = await runner.take(0, Version(1, 0), 55.0)
        assert take is not None
        assert [g.id for g in take.groups] == [0, 1, 3, 4, 5, 6, 7]
        await asyncio.sleep(55.0)
        assert runner.metrics()["rollout_timeouts"] == 2

    run_virtual(with_runner(tmp_path, options, rows, body, env=Stuck))


def test_code_that_ignores_cancellation_cannot_hold_the_run(tmp_path: Path) -> None:
    class Stubborn(Scripted):
        async def step(self, action: Message) -> Step:
            if self.row.get("stuck"):
                while True:
                    try:
                        await asyncio.sleep(1e9)
                    except asyncio.CancelledError:
                        if asyncio.get_running_loop().time() > 3e3:
                            raise
            return await super().step(action)

    options = RolloutOptions(groups_per_step=1, samples=2, staleness=0, time_limit=10.0, shuffle=False)
    rows: list[Row] = [{"rewards": Shared([0.0, 1.0]), "stuck": True}, {"rewards": Shared([0.0, 1.0])}]

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        take = await runner.take(0, Version(1, 0), 1000.0)
        assert take is not None
        assert take.groups[0].id == 1
        await asyncio.sleep(5e3)

    run_virtual(with_runner(tmp_path, options, rows, body, env=Stubborn))


def test_a_silent_run_ends_and_names_who_waits(tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=1, samples=2, staleness=0, time_limit=299.0, stall_seconds=300.0)

    class Hung(Scripted):
        async def reset(self, **_: Any) -> Any:
            while True:
                try:
                    await asyncio.sleep(1e9)
                except asyncio.CancelledError:
                    if asyncio.get_running_loop().time() > 1e6:
                        raise

    async def body(runner: Runner, engine: ScriptedEngine) -> None:
        with pytest.raises(RunError, match=r"no group ended for 300 s while some run: 1 of 1 groups live"):
            await runner.take(0, Version(1, 0), 1000.0)
        await asyncio.sleep(2e6)

    run_virtual(with_runner(tmp_path, options, rows_of(0.0, 1.0), body, env=Hung))
