"""`agentrl train`: engines, endpoint, rollouts, pool, trainer and publishing, joined.

    start      engines on the checkpoint's weights (or the model's), the trainer beside them
    streaming  rollouts → pool → feed → trainer → weights → publish → rollouts …, evaluations in between
    end        the trainer is done: the last weights go out, the last evaluation runs, the model is kept

Every part runs as a task of its own; the first one that fails ends the run, with its error.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

from agentrl.cluster.launcher import make_launcher
from agentrl.conductor.aside import Aside
from agentrl.conductor.check import RunPlan
from agentrl.conductor.config import RunConfig
from agentrl.conductor.desk import Desk
from agentrl.conductor.evaluation import Evaluator
from agentrl.conductor.feed import (
    Batch,
    CheckpointReady,
    Phase,
    RunIsOver,
    StepMetrics,
    WeightsReady,
)
from agentrl.conductor.gauge import PublishGauge
from agentrl.conductor.gauges import read_gauges
from agentrl.conductor.handover import Handover
from agentrl.conductor.imitate import keep_model
from agentrl.conductor.keeper import Keeper
from agentrl.conductor.meter import MeteredEngine, RolloutMeter
from agentrl.conductor.publish import Published, Publisher
from agentrl.conductor.sessions import sessions_of
from agentrl.conductor.training import Training
from agentrl.conductor.watchdog import Wait
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.router import PublishReport, Router
from agentrl.errors import RunError
from agentrl.rollout.player import Player
from agentrl.rollout.pool import Pool
from agentrl.rollout.runner import Runner
from agentrl.train.checkpoint import Checkpoint, oldest
from agentrl.types import Group, Version

LAST_PUBLISH_SECONDS = 300.0
STATE_EVERY = 2.0


async def reinforce(config: RunConfig, plan: RunPlan, desk: Desk, *, resume: bool) -> None:
    """Train until the steps are done; raises RunError with the cause where that cannot be."""
    desk.folder.need_space(16 * plan.model_bytes, "the checkpoints with optimizer state")
    run = _Run(config, plan, desk)
    try:
        await run.main()
    finally:
        await run.stop()
    await asyncio.to_thread(keep_model, desk)


class _Run:
    def __init__(self, config: RunConfig, plan: RunPlan, desk: Desk) -> None:
        self._config, self._plan, self._desk = config, plan, desk
        self._step = 0
        self._weights = desk.folder.weights_folder(plan.model_bytes)
        self._launcher = make_launcher(config, desk, self._weights, plan.train_rows + plan.eval_rows)
        self._fleet = self._launcher.fleet
        self._keeper = Keeper(desk, plan.env, config.monitor.keep_mb)
        self._handover = Handover(config.engine, lambda: self._fleet.router, self._offer, desk.note)
        self._training = Training(
            config,
            desk,
            self._weights,
            source=self,
            events=self,
            begin=self._begin,
            done=self._done,
            hand_over=True,
            on_trace=self._keeper.trace if self._keeper.on else None,
            on_commit=self._launcher.commit,
            make_group=self._launcher.make_group,
            routes=self._handover.routes if config.train.weights == "group" else None,
        )
        self._feed, self._watchdog = self._training.feed, self._training.watchdog
        self._supervisor = self._training.supervisor
        self._begun = ""
        self._opened = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._pool: Pool | None = None
        self._endpoint: Endpoint | None = None
        self._runner: Runner | None = None
        self._meter: RolloutMeter | None = None
        self._engine: MeteredEngine | None = None
        self._publisher: Publisher[PublishReport] = Publisher(
            self._publish, self._on_published, desk.note, owned=self._weights
        )
        self._gauge = PublishGauge()
        self._evaluator: Evaluator | None = None
        own = config.eval.every > 0 and config.eval.engine == "own"
        self._aside = Aside(config, desk, self._weights, lambda: self._fleet.router.current) if own else None

    # --- the run from start to end

    async def main(self) -> None:
        """Everything at once, until the trainer is done."""
        self._watchdog.probe(self._fleet.waits)
        self._watchdog.probe(self._rollout_waits)
        if self._aside is not None:
            self._watchdog.probe(self._aside.waits)
        self._pool = await Pool.open(self._desk.folder.pool, keep=self._config.rollout.keep)
        self._training.url = await self._launcher.open(self._feed)
        async with asyncio.TaskGroup() as group:
            parts = {
                "trainer": group.create_task(self._supervisor.run()),
                "watchdog": group.create_task(self._watchdog.run()),
                "feed": group.create_task(self._feed.broken()),
                "rollouts": group.create_task(self._stream()),
                "publisher": group.create_task(self._publisher.run()),
                "workers": group.create_task(self._launcher.run()),
                "state": group.create_task(self._tell_state()),
            }
            await asyncio.wait([parts["trainer"]])
            self._feed.finish(f"all {self._config.train.steps} steps are done")
            await _end(parts["rollouts"])
            if not await self._publisher.drained(LAST_PUBLISH_SECONDS):
                raise RunError(f"the last weights were not in the engines after {LAST_PUBLISH_SECONDS:.0f} s")
            if self._evaluator is not None:
                await self._evaluator.last(self._step)
            for task in parts.values():
                task.cancel()

    async def stop(self) -> None:
        """End whatever runs, in the order in which the parts need each other."""
        await self._supervisor.stop()
        if self._evaluator is not None:
            await self._evaluator.stop()
        if self._opening is not None:
            await _end(self._opening)
        self._gauge.stop()
        if self._endpoint is not None:
            await self._endpoint.stop()
        if self._aside is not None:
            await self._aside.stop()
        await self._handover.close()
        await self._launcher.close()
        if self._pool is not None:
            await self._pool.close()
        await asyncio.to_thread(self._keeper.close)
        shutil.rmtree(self._weights, ignore_errors=True)

    async def _stream(self) -> None:
        """Rollouts and engines, once they are open."""
        await self._opened.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fleet.run())
            group.create_task(self.runner.run())
            if self._aside is not None:
                group.create_task(self._aside.run())

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            raise RunError("rollouts are not open yet")
        return self._runner

    async def _begin(self, version: Version, checkpoint: Checkpoint | None) -> None:
        """A new incarnation: the engines serve its weights and the pool goes back to its checkpoint."""
        model = checkpoint.model if checkpoint else self._config.model.absolute()
        cursor = checkpoint.cursor if checkpoint else None
        self._step = checkpoint.step if checkpoint else 0
        # With the lines of takes and steps this tells which step trained what, apart from the pool's own books.
        taken = checkpoint.take if checkpoint else 0
        self._begun = str(version)
        self._desk.metrics.write("begin", {"step": self._step, "version": str(version), "take": taken})
        self._keeper.resumed(self._step)
        self._handover.abandon()
        if self._opening is None:
            # Engines and trainer load side by side; until the engines serve, `take` has nothing to give.
            self._opening = asyncio.create_task(self._open(model, version, cursor))
            self._opening.add_done_callback(self._fail_with)
            return
        await self._opened.wait()
        with self._watchdog.waiting("the conductor", f"the engines to go back to {version}"):
            await self._publisher.force(model, version)
        await self.runner.start(version, cursor)

    def _done(self) -> bool:
        return self._step >= self._config.train.steps or (self._runner is not None and self._runner.over)

    def _fail_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._feed.fail(error)

    async def _open(self, model: Path, version: Version, cursor: Any) -> None:
        assert self._pool is not None
        with self._watchdog.waiting("the conductor", "the engines to start"):
            async with asyncio.TaskGroup() as group:
                shared = group.create_task(self._fleet.start(model, version))
                aside = group.create_task(self._aside.start(model, version)) if self._aside else None
        router = shared.result()
        self._publisher.current = model
        self._engine = MeteredEngine(router)
        self._meter = RolloutMeter(self._engine)
        self._endpoint = Endpoint(self._engine, ChatTemplate.load(self._config.model), self._config.endpoint)
        await self._endpoint.start()
        elsewhere, sessions = self._launcher.player(self._engine), sessions_of(self._endpoint)
        self._runner = Runner(
            self._config.rollout,
            pool=self._pool,
            rows=self._plan.train_rows,
            seed=self._config.seed,
            env=self._plan.env,
            make_env=self._plan.make_env,
            make_agent=self._plan.make_agent,
            open_session=sessions,
            on_group=self._on_group,
            player=elsewhere,
        )
        if self._config.eval.every:
            player = elsewhere or Player(
                self._config.rollout,
                make_env=self._plan.make_env,
                make_agent=self._plan.make_agent,
                open_session=aside.result() if aside else sessions,
            )
            self._evaluator = Evaluator(
                self._config.eval,
                player,
                self._plan.eval_rows,
                self._config.seed,
                self._desk,
                self._watchdog,
                self._fail_with,
                self._keeper.evaluated,
                self._aside.pin if self._aside else None,
            )
        await self._runner.start(version, cursor)
        if self._runner.data_start:
            self._desk.note(
                f"the rows are others than in an earlier part of this run: they count from position "
                f"{self._runner.data_start}, their first row first; finished groups of the earlier rows stay"
            )
        self._desk.note(f"engines serve {version}, rollouts start")
        self._opened.set()
        if version.number == 0 and self._evaluator is not None:
            self._evaluator.due(0)

    # --- the feed's source

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        """The batch of `step` out of the pool."""
        if self._runner is None:
            await asyncio.sleep(wait)
            return None
        take = await self._runner.take(step, version, wait)
        if take is not None:
            told = {"step": step, "version": str(version), "take": take.id, "groups": list(take.ids)}
            self._desk.metrics.write("take", told)
            self._keeper.taken(step, take.ids)
            groups = await asyncio.to_thread(lambda: take.groups)  # decoded there, so that the event loop goes on
            return Batch(take.id, groups, take.cursor, bodies=take.bodies)
        if self._runner.over:
            raise RunIsOver(f"all rows were played for {self._config.rollout.epochs} epochs")
        return None

    # --- what the trainer reports

    async def weights(self, ready: WeightsReady) -> None:
        """New weights: they go out while the trainer goes on."""
        if ready.version == self._begun:
            return  # a resumed trainer hands over what the engines were started with
        if self._aside is not None:
            self._aside.keep(ready)
        if not self._handover.arrived(ready):
            self._offer(self._launcher.located(ready))

    def _offer(self, ready: WeightsReady) -> None:
        self._publisher.offer(ready)

    async def metrics(self, report: StepMetrics) -> None:
        """A step is done: merge what everybody measured."""
        if report.step <= self._step:
            return  # told twice, over a connection that broke
        self._step = report.step
        self._watchdog.beat(f"step {report.step}")
        self._supervisor.stepped(report)
        line = {"step": report.step, "version": report.version, **await self._measured(report)}
        self._desk.view.step(self._desk.metrics.write("step", line))
        last = report.step >= self._config.train.steps
        if self._evaluator is not None and report.step % self._config.eval.every == 0 and not last:
            self._evaluator.due(report.step)

    async def checkpoint(self, ready: CheckpointReady) -> None:
        """A checkpoint is whole: the pool may forget what none needs any more."""
        self._watchdog.beat(f"checkpoint of step {ready.step}")
        self._supervisor.saved(ready)
        self._desk.metrics.write("checkpoint", {"step": ready.step, "path": ready.path})
        found = await asyncio.to_thread(oldest, self._desk.folder.checkpoints)
        if found is not None:
            await self.runner.retain(found.cursor)

    async def phase(self, phase: Phase) -> None:
        """A rank is alive."""
        self._supervisor.heard(phase)

    async def _measured(self, report: StepMetrics) -> dict[str, Any]:
        found: dict[str, Any] = dict(report.metrics)
        # Filtered groups are never in a batch, so its mean says little of the policy: the headline is all episodes'.
        found["reward/batch_mean"] = found.pop("reward/mean", None)
        found["reward/mean"] = found["reward/batch_mean"]
        if self._meter is not None:
            found |= self._meter.drain()
        found |= self.runner.metrics()
        found["pool/pooled"] = found.get("rollout_pooled_now", 0.0)
        step, take = found.get("seconds/step"), found.get("seconds/take")
        if isinstance(step, float) and isinstance(take, float) and step > 0:
            found["trainer/idle_share"] = min(1.0, take / step)
        found |= self._gauge.last
        found["publish/count"] = self._gauge.count
        found["faults/trainer"], found["faults/engines"] = self._supervisor.deaths, self._fleet.deaths
        return found

    # --- publishing

    async def _publish(self, path: Path, version: Version) -> PublishReport:
        self._gauge.longest_gap(await self._longest_gap())
        with self._watchdog.waiting("the publisher", f"the engines to load {version}"):
            # An engine that is being started again is no refusal.
            await self._fleet.serving()
            if (load := await self._handover.load(version)) is not None:
                return await self._fleet.router.publish(path, version, load)
            return await self._fleet.publish(path, version)

    async def _on_published(self, done: Published[PublishReport]) -> None:
        self._watchdog.beat(f"publish of {done.version}")
        assert self._engine is not None
        figures = self._gauge.published(done, self._engine, self._handover.carried)
        await self.runner.published(done.version)
        self._desk.metrics.write("publish", {"step": done.step, "version": str(done.version), **figures})
        if done.report.failed:
            self._desk.note(f"weights {done.version} did not get into {done.report.failed}")

    async def _longest_gap(self) -> float | None:
        """The longest time without a token since the last publish, its own stall included, over the engines."""
        gaps = [c["longest_gap_ms"] for c in await self._fleet.counters() if "longest_gap_ms" in c]
        return max(gaps, default=None)

    # --- watching

    def _on_group(self, group: Group, fate: str) -> None:
        self._watchdog.beat(f"group {group.id} {fate}")
        if self._meter is not None:
            self._meter.group(group, fate)
        self._keeper.group(group, fate, self._step + 1)

    def _rollout_waits(self) -> list[Wait]:
        if self._runner is None:
            return []
        return [Wait("rollouts", self._runner.waits_for(), 0.0)]

    def _engine_state(self, router: Router | None) -> str:
        if router is None or self._engine is None:
            return "starting"
        fenced = "; ".join(f"{url} serves nothing: {why}" for url, why in router.fenced.items())
        return f"{fenced or 'all serve'}, {self._engine.in_flight} requests in flight"

    async def _tell_state(self) -> None:
        while True:
            fleet = self._fleet if self._opened.is_set() else None
            router = fleet.router if fleet is not None else None
            state = {
                "phase": "training" if router else "starting",
                "time": time.time(),
                "step": self._step,
                "steps": self._config.train.steps,
                "published": str(self._runner.version) if self._runner else None,
                "gate": str(self._runner.gate) if self._runner else None,
                "pool": self._runner.pool_state() if self._runner else None,
                "engines": self._engine_state(router),
                "trainer": "; ".join(str(wait) for wait in self._supervisor.waits()),
                "waits": [str(wait) for wait in self._watchdog.waits()],
                "gauges": await read_gauges(
                    self._supervisor, self._step, self._endpoint, self._engine, self._runner, fleet
                ),
            }
            self._desk.view.state(state)
            await asyncio.to_thread(self._desk.folder.write_state, state)
            await asyncio.sleep(STATE_EVERY)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
