"""One step of the real trainer on this machine's CPU, over the real feed, with a group at hand: for `--dry-run`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from agentrl.child import Child
from agentrl.conductor.cause import death
from agentrl.conductor.config import RunConfig
from agentrl.conductor.feed import Batch, CheckpointReady, FeedServer, Phase, StepMetrics, WeightsReady
from agentrl.conductor.folder import write_atomically
from agentrl.errors import ConfigError
from agentrl.train.options import TrainerJob, TrainOptions
from agentrl.types import Group, Version

STEP_SECONDS = 900.0
"""Torch, DeepSpeed and the model are loaded in it."""
_ONE_STEP = {"steps": 1, "batch_groups": 1, "minibatches": 1, "warmup_steps": 0, "ranks": 1, "checkpoint_every": 0}


class _OneBatch:
    """A feed's source and its events: one group, one report."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.phase_now = "loading"
        self.measured: asyncio.Future[StepMetrics] = asyncio.get_running_loop().create_future()

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        return Batch(1, [self._group], {})

    async def weights(self, ready: WeightsReady) -> None:
        """None are handed over."""

    async def metrics(self, report: StepMetrics) -> None:
        if not self.measured.done():
            self.measured.set_result(report)

    async def checkpoint(self, ready: CheckpointReady) -> None:
        """The folder goes away with everything else."""

    async def phase(self, phase: Phase) -> None:
        self.phase_now = phase.phase


async def first_step(config: RunConfig, group: Group, folder: Path) -> StepMetrics:
    """Train one step on `group` with the config's model and algorithm; files go to `folder`.

    ConfigError with the trainer's first error where it fails.
    """
    source = _OneBatch(group)
    feed = FeedServer(source, source)
    await feed.begin(1)
    url = await feed.start()
    child = _start(config, url, feed.token, folder)
    try:
        async with asyncio.timeout(STEP_SECONDS):
            while not source.measured.done():
                if (code := child.poll()) is not None and not source.measured.done():
                    raise ConfigError(f"one step of the trainer failed: {death(child, code)}")
                await asyncio.wait([source.measured], timeout=0.1)
        return source.measured.result()
    except TimeoutError as error:
        raise ConfigError(
            f"one step of the trainer was not done within {STEP_SECONDS:.0f} s, it was in {source.phase_now!r}: "
            f"see {child.tail(5)}"
        ) from error
    finally:
        await child.stop()
        await feed.stop()


def _start(config: RunConfig, url: str, token: str, folder: Path) -> Child:
    given = config.train.model_dump(exclude_unset=True)
    dropped = {"gpus", "collective_timeout", "keep_checkpoints"}
    train = TrainOptions.model_validate({**{k: v for k, v in given.items() if k not in dropped}, **_ONE_STEP})
    job = TrainerJob(
        run=f"{config.name}-dry-run",
        train=train,
        algorithm=config.algorithm,
        model_dir=config.model.absolute(),
        feed_url=url,
        weights_dir=folder / "weights",
        checkpoints_dir=folder / "checkpoints",
        seed=config.seed,
        hand_over=False,
    )
    path = folder / "trainer.json"
    write_atomically(path, job.model_dump_json(indent=1, exclude_unset=True))
    environment = {
        "AGENTRL_TOKEN": token,
        "CUDA_VISIBLE_DEVICES": "",  # the GPUs may be at work
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    environment |= {k: os.environ.get(k, threads) for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    argv = [sys.executable, "-m", "agentrl.train", str(path)]
    return Child("the trainer", argv, log=folder / "trainer.log", env=environment)
