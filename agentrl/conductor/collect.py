"""`agentrl rollout`: engines and episodes without a trainer. The pool that it fills is what `agentrl replay` reads."""

from __future__ import annotations

import asyncio
import time

from agentrl.conductor.check import RunPlan
from agentrl.conductor.config import RunConfig
from agentrl.conductor.desk import Desk
from agentrl.conductor.engines import Fleet
from agentrl.conductor.gauges import engine_gauges, rollout_gauges
from agentrl.conductor.meter import MeteredEngine
from agentrl.conductor.watchdog import Watchdog
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.errors import ConfigError, RunError
from agentrl.rollout.gate import Stage
from agentrl.rollout.pool import Pool
from agentrl.rollout.runner import Runner
from agentrl.rollout.session import Session, SessionSpec
from agentrl.types import Group, Version

_STATE_EVERY = 2.0


def check_collect(config: RunConfig) -> None:
    """ConfigError where it cannot be done here."""
    if config.cluster.kind != "local":
        raise ConfigError(f"cluster.kind = {config.cluster.kind!r}: `agentrl rollout` plays on this machine alone")


async def collect(config: RunConfig, plan: RunPlan, desk: Desk, groups: int) -> None:
    """Play until `groups` groups are in the run's pool, rounded up to whole batches; or all rows are played."""
    collection = _Collection(config, plan, desk, groups)
    try:
        await collection.main()
    finally:
        await collection.stop()


class _Collection:
    def __init__(self, config: RunConfig, plan: RunPlan, desk: Desk, groups: int) -> None:
        self._config, self._plan, self._desk = config, plan, desk
        batch = config.rollout.groups_per_step
        batches = -(-groups // batch)
        self._wanted = batches * batch
        # Nothing trains, so nothing leaves: the gate's room, (η+1)·B, is what is to be played.
        self._rollout = config.rollout.model_copy(update={"staleness": batches - 1, "when_stale": "wait"})
        monitor = config.monitor
        self._fleet = Fleet(
            config.engine,
            config.model,
            desk,
            restarts=monitor.engine_restarts,
            silent_seconds=monitor.silent_seconds,
        )
        self._watchdog = Watchdog(monitor.stall_seconds, desk.note)
        self._endpoint: Endpoint | None = None
        self._pool: Pool | None = None
        self._changed = asyncio.Event()
        self._rewards: list[float] = []
        self._tokens = 0

    async def main(self) -> None:
        """From the engines' start to the last group."""
        version = Version(self._desk.folder.next_incarnation(), 0)
        self._pool = await Pool.open(self._desk.folder.pool)
        with self._watchdog.waiting("the conductor", "the engines to start"):
            router = await self._fleet.start(self._config.model.absolute(), version)
        engine = MeteredEngine(router)
        self._endpoint = Endpoint(engine, ChatTemplate.load(self._config.model), self._config.endpoint)
        await self._endpoint.start()
        runner = Runner(
            self._rollout,
            pool=self._pool,
            rows=self._plan.train_rows,
            seed=self._config.seed,
            env=self._plan.env,
            make_env=self._plan.make_env,
            make_agent=self._plan.make_agent,
            open_session=self._open_session,
            on_group=self._on_group,
        )
        await runner.start(version)
        self._desk.note(f"{runner.gate.count(Stage.POOLED)} groups are there, {self._wanted} are wanted")
        await self._until_enough(runner, engine)
        pooled = runner.gate.count(Stage.POOLED)
        told: dict[str, float] = {"groups": pooled, "episodes": len(self._rewards), "tokens": self._tokens}
        if self._rewards:
            told["reward_mean"] = sum(self._rewards) / len(self._rewards)
        self._desk.metrics.write("rollout", told)
        self._desk.note(f"{pooled} groups are in {self._desk.folder.pool}: {told}")
        if pooled == 0:
            raise RunError(f"no group of {len(self._plan.train_rows)} rows can be trained on: {dict(runner.counts)}")

    async def _until_enough(self, runner: Runner, engine: MeteredEngine) -> None:
        watching = (self._fleet.run(), self._watchdog.run(), self._tell_state(runner, engine))
        parts = [asyncio.create_task(part) for part in (runner.run(), *watching)]
        enough = asyncio.create_task(self._enough(runner))
        try:
            await asyncio.wait([enough, *parts], return_when=asyncio.FIRST_COMPLETED)
            for task in (*parts, enough):
                if task.done():
                    task.result()
        finally:
            for task in (enough, *parts):
                task.cancel()
            await asyncio.gather(enough, *parts, return_exceptions=True)

    async def _tell_state(self, runner: Runner, engine: MeteredEngine) -> None:
        assert self._endpoint is not None
        while True:
            state = {
                "phase": "rolling out",
                "time": time.time(),
                "gate": str(runner.gate),
                "pool": f"{runner.gate.count(Stage.POOLED)} of {self._wanted} groups are there",
                "engines": f"{engine.in_flight} requests in flight",
                "waits": [runner.waits_for(), *(str(wait) for wait in self._watchdog.waits())],
                "gauges": rollout_gauges(self._endpoint, engine, runner) | await engine_gauges(self._fleet),
            }
            self._desk.view.state(state)
            await asyncio.to_thread(self._desk.folder.write_state, state)
            await asyncio.sleep(_STATE_EVERY)

    async def _enough(self, runner: Runner) -> None:
        while runner.gate.count(Stage.POOLED) < self._wanted and not runner.exhausted:
            self._changed.clear()
            await self._changed.wait()

    def _on_group(self, group: Group, fate: str) -> None:
        self._watchdog.beat(f"group {group.id} {fate}")
        self._changed.set()
        self._rewards += [episode.reward for episode in group.episodes if episode.reward is not None]
        self._tokens += sum(int(t.loss_mask.sum()) for e in group.episodes for t in e.trajectories)

    def _open_session(self, spec: SessionSpec) -> Session:
        assert self._endpoint is not None
        return self._endpoint.open(
            spec.id,
            seed=spec.seed,
            training=spec.training,
            temperature=spec.temperature,
            max_tokens=spec.max_tokens,
            deadline=spec.deadline,
        )

    async def stop(self) -> None:
        """End what runs."""
        if self._endpoint is not None:
            await self._endpoint.stop()
        await self._fleet.stop()
        if self._pool is not None:
            await self._pool.close()
