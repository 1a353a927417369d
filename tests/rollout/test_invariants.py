"""Gate, pool and runner under random schedules, in virtual time: the bound, the ledger, and progress.

A simulated trainer takes, skips, publishes late, checkpoints and dies; the whole conductor dies; environments are slow,
fail, lose sandboxes and give equal rewards. The checks read the ledger's file with SQL of their own.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.errors import RunError, SandboxLost
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.pool import Pool, Take
from agentrl.rollout.runner import Runner
from agentrl.rollout.session import Session, SessionSpec
from agentrl.testing.clock import run_virtual
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.session import byte_sessions
from agentrl.types import Message, Row, Sampled, Step, Version


class Weather(Env):
    """Its behaviour is drawn from the episode's seed and, to differ within a group, from `draw`."""

    def __init__(self, row: Row, draw: random.Random) -> None:
        super().__init__(row)
        self.draw = draw

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        self.dice = random.Random(f"{seed} {self.draw.random()}")
        self.left = self.dice.choice([1, 1, 2, 4])
        if self.dice.random() < self.row["broken"]:
            raise ValueError("broken")
        return [{"role": "user", "content": "go"}], {}

    async def step(self, action: Message) -> Step:
        await asyncio.sleep(self.dice.choice([0.0, 0.1, 1.0, self.row["slowest"]]))
        if self.dice.random() < self.row["lost"]:
            raise SandboxLost("gone")
        self.left -= 1
        return Step([{"role": "user", "content": "on"}], float(self.dice.choice([0, 1])), self.left == 0, False, {})


FIRST = Version(1, 0)
EXAMPLES = int(os.environ.get("AGENTRL_EXAMPLES", "12"))


def slow_engine() -> ScriptedEngine:
    return ScriptedEngine(lambda prompt: [65] * 4, token_delay=0.3)


@dataclass
class World:
    """One random run and what is to be remembered of it."""

    seed: int
    options: RolloutOptions
    steps: int
    rows: int
    death: float
    folder: Path
    version: Version = FIRST
    engines: tuple[ScriptedEngine, ...] = field(default_factory=lambda: (slow_engine(), slow_engine()))
    trained: dict[int, tuple[Take, bool]] = field(default_factory=dict)
    lineage: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: list[tuple[int, int, Any]] = field(default_factory=list)
    deaths: int = 0
    publishing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.draw = random.Random(self.seed)

    def open_session(self, spec: SessionSpec) -> Session:
        """On one of the engines, as a router would choose it."""
        return byte_sessions(self.engines[sum(spec.id.encode()) % len(self.engines)])(spec)

    def fork(self, label: Version) -> int:
        """The last version that the label's weights and the present ones have in common, told from the story."""
        later = (start for incarnation, start in self.lineage if incarnation > label.incarnation)
        return min(later, default=label.number)

    def row(self, index: int) -> Row:
        return {"broken": 0.05, "lost": 0.05, "slowest": random.Random(f"{self.seed} {index}").choice([2.0, 30.0])}


def check_take(world: World, take: Take, step: int, version: Version) -> None:
    assert take.step == step
    assert take.version == version
    for group in take.groups:
        for episode in group.episodes:
            for trajectory in episode.trajectories if episode.scored else ():
                for segment in trajectory.segments:
                    if isinstance(segment.source, Sampled):
                        label = segment.source.version
                        fork = world.fork(label)
                        if not world.options.keep_abandoned:
                            assert label.number <= fork, f"{label} is abandoned: {world.lineage}"
                        way = version.number - min(label.number, fork) + max(0, label.number - fork)
                        assert 0 <= way <= world.options.staleness
    earlier = [g.id for at, (other, _) in world.trained.items() if at < step for g in other.groups]
    assert not {g.id for g in take.groups} & set(earlier), "trained twice"
    assert [world.trained[at][0].id for at in sorted(world.trained) if at < step] == list(range(1, take.id))


async def one_life(world: World) -> bool:
    """One conductor's life, from start or resume to its death or the run's end; whether the run ended."""
    pool = await Pool.open(world.folder / "pool.sqlite", keep=world.options.keep)
    runner = Runner(
        world.options,
        pool=pool,
        rows=[world.row(i) for i in range(world.rows)],
        seed=world.seed,
        env="weather",
        make_env=lambda row: Weather(row, world.draw),
        make_agent=Agent,
        open_session=world.open_session,
    )
    await resume(world, runner, await pool.incarnation())
    streaming = asyncio.create_task(runner.run())
    try:
        return await train(world, runner)
    finally:
        if world.publishing is not None:
            world.publishing.cancel()
            world.publishing = None
        streaming.cancel()
        await asyncio.wait([streaming])
        await pool.close()


async def resume(world: World, runner: Runner, last: int) -> None:
    step, number, cursor = world.checkpoints[-1] if world.checkpoints else (0, 0, None)
    world.version = Version(last + 1, number)
    world.lineage.append((last + 1, number))
    world.trained = {at: taken for at, taken in world.trained.items() if at < step}
    for engine in world.engines:
        engine.set_version(world.version)
    await runner.start(world.version, cursor)


async def train(world: World, runner: Runner) -> bool:
    step = world.checkpoints[-1][0] if world.checkpoints else 0
    while step < world.steps:
        try:
            take = await runner.take(step, world.version, 5000.0)
        except RunError:
            if runner.over and not runner.counts["pooled"]:
                return True  # two rows, one epoch, bad luck: said, and not a silent end
            raise
        if take is None:
            assert runner.over, f"no progress: {runner.waits_for()}"
            return True
        check_take(world, take, step, world.version)
        if world.dice.random() < 0.3:
            assert (await runner.take(step, world.version, 0.0)) == take
        await asyncio.sleep(world.dice.choice([0.1, 2.0, 20.0]))
        if world.publishing is not None:
            await world.publishing
        skipped = world.dice.random() < 0.15
        world.trained[step] = (take, not skipped)
        step += 1
        if not skipped:
            world.version = Version(world.version.incarnation, world.version.number + 1)
            # Often the trainer asks for the next batch before the engines have this one's weights.
            world.publishing = asyncio.create_task(publish(world, runner, world.version))
            if world.dice.random() < 0.7:
                await world.publishing
        if world.dice.random() < 0.3:
            world.checkpoints.append((step, world.version.number, take.cursor))
            if len(world.checkpoints) > 2:
                del world.checkpoints[0]
                await runner.retain(world.checkpoints[0][2])
        if world.dice.random() < world.death and world.deaths < 6:
            world.deaths += 1
            if world.dice.random() < 0.3 and len(world.checkpoints) == 2:
                world.checkpoints.pop()  # back to the older one
            if world.dice.random() < 0.5:
                return False
            await resume(world, runner, world.version.incarnation)
            step = world.checkpoints[-1][0] if world.checkpoints else 0
    return True


async def publish(world: World, runner: Runner, version: Version) -> None:
    await asyncio.sleep(world.dice.choice([0.0, 3.0]))
    if version.incarnation == world.version.incarnation:  # otherwise the trainer died, and its last word comes late
        for engine in world.engines:  # for a moment they differ; the runner hears of it last, as in life
            engine.set_version(version)
            await asyncio.sleep(0.5)
    await runner.published(version)
    assert runner.gate.live <= runner.gate.limit or world.deaths


def check_ledger(world: World) -> Counter[str]:
    db = sqlite3.connect(world.folder / "pool.sqlite")
    with db:
        found = dict(db.execute("SELECT position, state FROM positions").fetchall())
        takes = [row[0] for row in db.execute("SELECT id FROM takes ORDER BY id")]
        reasons = db.execute("SELECT COUNT(*) FROM positions WHERE state IN ('filtered','given_up') AND reason = ''")
        assert reasons.fetchone() == (0,)
        held = dict(db.execute("SELECT position, take FROM positions WHERE take IS NOT NULL").fetchall())
    db.close()
    assert takes == list(range(1, len(takes) + 1)), "take ids tile"
    assert sorted(found) == list(range(len(found))), "no position is missing"
    for step, (take, updated) in world.trained.items():
        for group in take.groups:
            assert held[group.id] == take.id == step + 1
            assert found[group.id] in (("trained", "taken") if updated else ("trained", "taken", "given_up"))
    of_takes = {group.id for take, _ in world.trained.values() for group in take.groups}
    assert {p for p, state in found.items() if state in ("trained", "taken")} <= of_takes, "trained without a take"
    return Counter(found.values())


async def whole_story(world: World) -> None:
    while not await one_life(world):
        pass


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    staleness=st.integers(0, 3),
    policy=st.sampled_from(["wait", "drop"]),
    rows=st.integers(1, 12),
    epochs=st.sampled_from([None, 1, 3]),
    tight=st.booleans(),
    extra=st.integers(0, 1),
    keep=st.booleans(),
)
def test_bound_ledger_and_progress(
    seed: int,
    batch: int,
    staleness: int,
    policy: str,
    rows: int,
    epochs: int | None,
    tight: bool,
    extra: int,
    keep: bool,
) -> None:
    options = RolloutOptions.model_validate(
        {
            "groups_per_step": batch,
            "samples": 3,
            "extra_samples": extra,
            "staleness": staleness,
            "when_stale": policy,
            "concurrency": 3 + extra if tight else None,
            "time_limit": 60.0,
            "epochs": epochs,
            "straggler_seconds": 5.0 if seed % 2 else None,
            "keep_abandoned": keep and staleness > 0,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, options, steps=8, rows=rows, death=0.2, folder=Path(folder))
        run_virtual(whole_story(world))
        counts = check_ledger(world)
        if len(world.trained) < world.steps:
            assert epochs is not None
            assert sum(counts.values()) == rows * epochs
            assert set(counts) <= {"trained", "taken", "filtered", "given_up"}, counts


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_batches(seed: int, tmp_path: Path) -> None:
    options = RolloutOptions(groups_per_step=2, samples=3, staleness=0)
    stories = []
    for name in ("a", "b"):
        folder = tmp_path / name
        world = World(seed, options, steps=5, rows=6, death=0.0, folder=folder)
        run_virtual(whole_story(world))
        stories.append(
            [(t.id, [(g.id, [e.seed for e in g.episodes]) for g in t.groups]) for t, _ in world.trained.values()]
        )
    assert stories[0] == stories[1]
