"""`agentrl sft`: the same trainer behind the same feed, with conversations instead of rollouts."""

from __future__ import annotations

import asyncio
import os
import shutil
import time

from agentrl.cluster.ranks import RanksAlone
from agentrl.conductor.check import SftPlan
from agentrl.conductor.config import RunConfig, SftConfig
from agentrl.conductor.conversations import Conversations
from agentrl.conductor.desk import Desk
from agentrl.conductor.feed import BatchSource, CheckpointReady, Phase, StepMetrics, WeightsReady
from agentrl.conductor.gauges import trainer_gauges
from agentrl.conductor.training import Training
from agentrl.errors import RunError
from agentrl.train.checkpoint import Checkpoint, newest
from agentrl.types import Version


async def imitate(config: SftConfig, plan: SftPlan, desk: Desk, *, resume: bool) -> None:
    """Train on the conversations; the result is `runs/<name>/model`."""
    source = Conversations(
        plan.train,
        plan.held_out,
        plan.render,
        batch=config.train.batch_groups,
        steps=config.train.steps,
        eval_every=config.sft.eval_every,
        seed=config.seed,
    )
    await train_from(source, config, desk, plan.model_bytes)


async def train_from(source: BatchSource, config: SftConfig | RunConfig, desk: Desk, model_bytes: int) -> None:
    """Train on what `source` has, without engines; the result is `runs/<name>/model`."""
    desk.folder.need_space(10 * model_bytes, "two checkpoints with optimizer state")
    run = _Alone(source, config, desk, model_bytes)
    try:
        await run.main()
    finally:
        await run.stop()
    await asyncio.to_thread(keep_model, desk)


class _Alone:
    """A trainer and its feed."""

    def __init__(self, source: BatchSource, config: SftConfig | RunConfig, desk: Desk, model_bytes: int) -> None:
        self._config = config
        self._desk = desk
        self._weights = desk.folder.weights_folder(model_bytes)
        self._step = 0
        silent, elsewhere = config.monitor.silent_seconds, config.cluster.kind != "local"
        self._hosts = RanksAlone(config.cluster, desk, run=config.name, silent_seconds=silent) if elsewhere else None
        self._training = Training(
            config,
            desk,
            self._weights,
            source=source,
            events=self,
            begin=self._begin,
            done=self._done,
            hand_over=False,
            on_commit=self._hosts.ranks.commit if self._hosts else None,
            make_group=self._hosts.ranks.start if self._hosts else None,
        )
        self._feed, self._watchdog = self._training.feed, self._training.watchdog
        self._supervisor = self._training.supervisor

    async def main(self) -> None:
        self._training.url = await (self._hosts.open(self._feed) if self._hosts else self._feed.start())
        tasks = [asyncio.create_task(work) for work in (self._watchdog.run(), self._supervisor.run())]
        if self._hosts is not None:
            tasks.append(asyncio.create_task(self._hosts.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        await self._supervisor.stop()
        if self._hosts is not None:
            await self._hosts.close()
        await self._feed.stop()
        shutil.rmtree(self._weights, ignore_errors=True)

    async def _begin(self, version: Version, checkpoint: Checkpoint | None) -> None:
        # A batch follows from its step's number: there is nothing to go back to.
        self._step = checkpoint.step if checkpoint else 0

    def _done(self) -> bool:
        return self._step >= self._config.train.steps

    async def weights(self, ready: WeightsReady) -> None:
        """Nobody samples here, and the trainer was told so."""
        raise RunError(f"the trainer handed over weights {ready.version} although nobody samples")

    async def metrics(self, report: StepMetrics) -> None:
        self._watchdog.beat(f"step {report.step}")
        if "eval/loss" in report.metrics:
            self._desk.metrics.write("eval", {"step": report.step, "version": report.version, **report.metrics})
            self._desk.note(f"held-out loss at step {report.step}: {report.metrics['eval/loss']:.4f}")
            return
        self._step = report.step
        self._supervisor.stepped(report)
        # A demonstration has no reward: what is said of rewards and turns would be noise.
        noise = ("reward/", "episodes/", "turns/", "groups") if self._config.algorithm.name == "sft" else ()
        told = {k: v for k, v in report.metrics.items() if not k.startswith(noise)}
        line = self._desk.metrics.write("step", {"step": report.step, "version": report.version, **told})
        self._desk.view.step(line)
        self._desk.folder.write_state(
            {
                "phase": "training",
                "time": time.time(),
                "step": self._step,
                "steps": self._config.train.steps,
                "gauges": trainer_gauges(self._supervisor, self._step),
                "waits": [str(wait) for wait in self._watchdog.waits()],
            }
        )

    async def checkpoint(self, ready: CheckpointReady) -> None:
        self._watchdog.beat(f"checkpoint of step {ready.step}")
        self._supervisor.saved(ready)
        self._desk.metrics.write("checkpoint", {"step": ready.step, "path": ready.path})

    async def phase(self, phase: Phase) -> None:
        self._supervisor.heard(phase)


def keep_model(desk: Desk) -> None:
    """`runs/<name>/model` becomes the newest checkpoint's model; the old one stays until the new one is whole."""
    checkpoint, _ = newest(desk.folder.checkpoints)
    if checkpoint is None:
        raise RunError(f"the trainer ended without a checkpoint in {desk.folder.checkpoints}: see logs/trainer.log")
    aside, target = desk.folder.model.with_name(".model.aside"), desk.folder.model
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(checkpoint.model, aside)
    if target.exists():
        shutil.rmtree(target)
    os.rename(aside, target)
    desk.note(f"the model of step {checkpoint.step} is in {target}")
