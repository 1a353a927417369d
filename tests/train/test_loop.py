"""The whole trainer as a process, against the conductor's real feed: it learns, stops, goes on from a checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentrl.conductor.feed import (
    Batch,
    CheckpointReady,
    FeedServer,
    Phase,
    RunIsOver,
    StepMetrics,
    WeightsReady,
)
from agentrl.train import checkpoint
from agentrl.train.options import AlgorithmOptions, TrainerJob, TrainOptions
from agentrl.types import Context, Episode, Group, Sampled, Segment, Stop, Trajectory, Turn, Version

GROUPS, SAMPLES, ANSWER = 8, 8, 2
TRAIN = TrainOptions(steps=40, lr=5e-2, checkpoint_every=5, keep_checkpoints=2, tokens_per_microbatch=400)
SECONDS = 900
"""For a trainer to start and do its steps; a handful where nothing else runs."""


class Rollouts:
    """Plays a two-token task with the newest published weights: half the vocabulary is right."""

    def __init__(self, model: Path, last: int, over: str | None) -> None:
        self.folder, self.version, self.last, self.over = model, Version(1, 0), last, over
        self.rng = torch.Generator().manual_seed(0)
        self.weights: list[WeightsReady] = []
        self.reports: list[StepMetrics] = []
        self.checkpoints: list[CheckpointReady] = []
        self.phases: list[Phase] = []
        self.idle = asyncio.Event()

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        if step > self.last:
            if self.over is not None:
                raise RunIsOver(self.over)
            self.idle.set()
            await asyncio.sleep(wait)
            return None
        assert version == self.version, "the trainer did not hand its weights over before it asked for more"
        with torch.no_grad():
            return Batch(step, self.play(step), {"row": step * GROUPS})

    def play(self, step: int) -> Sequence[Group]:
        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        prompts = torch.randint(0, 200, (GROUPS, 3), generator=self.rng).repeat_interleave(SAMPLES, 0)
        tokens, logprobs = prompts, []
        for _ in range(ANSWER):
            logp = model(input_ids=tokens, use_cache=False).logits[:, -1].log_softmax(1)
            chosen = torch.multinomial(logp.exp(), 1, generator=self.rng)
            tokens = torch.cat([tokens, chosen], 1)
            logprobs.append(logp.gather(1, chosen).squeeze(1))
        right = (tokens[:, 3:] < 130).float().mean(1)
        said = torch.stack(logprobs, 1).numpy()
        return [
            Group(
                step * GROUPS + g,
                0,
                0,
                "halves",
                tuple(
                    self.episode(step * GROUPS + g, s, tokens[row].numpy(), said[row], float(right[row]))
                    for s, row in enumerate(range(g * SAMPLES, (g + 1) * SAMPLES))
                ),
            )
            for g in range(GROUPS)
        ]

    def episode(
        self,
        group: int,
        sample: int,
        tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
        logprobs: object,
        reward: float,
    ) -> Episode:
        ids = tokens.astype(np.int32)
        shown, said = Segment(ids[:3], None, Context()), Segment(ids[3:], np.asarray(logprobs), Sampled(self.version))
        turn = Turn(0, 0, 3 + ANSWER, reward)
        return Episode(group, sample, 0, 0, {}, (), (turn,), (Trajectory((shown, said)),), Stop.FINISHED)

    async def on_weights(self, ready: WeightsReady) -> None:
        self.weights.append(ready)
        self.folder, self.version = Path(ready.path), Version.parse(ready.version)


class Events:
    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts

    async def weights(self, ready: WeightsReady) -> None:
        await self.rollouts.on_weights(ready)

    async def metrics(self, report: StepMetrics) -> None:
        self.rollouts.reports.append(report)

    async def checkpoint(self, ready: CheckpointReady) -> None:
        self.rollouts.checkpoints.append(ready)

    async def phase(self, phase: Phase) -> None:
        self.rollouts.phases.append(phase)


async def start(job: TrainerJob, server: FeedServer, folder: Path, ranks: int) -> asyncio.subprocess.Process:
    file = folder / f"trainer-{job.incarnation}.json"
    file.write_text(job.model_dump_json(exclude_unset=True))
    prefix = [sys.executable]
    if ranks > 1:
        prefix += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with (folder / f"log-{job.incarnation}").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *prefix,
            "-m",
            "agentrl.train",
            str(file),
            env={**os.environ, "AGENTRL_TOKEN": server.token, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )


def a_job(folder: Path, model: Path, url: str, **more: object) -> TrainerJob:
    given = {
        "run": "test",
        "train": TRAIN,
        "algorithm": AlgorithmOptions(),
        "model_dir": model,
        "feed_url": url,
        "weights_dir": folder / "weights",
        "checkpoints_dir": folder / "checkpoints",
        **more,
    }
    return TrainerJob.model_validate(given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def gone(process: asyncio.subprocess.Process) -> None:
    """No trainer is left behind by a test that failed."""
    if process.returncode is None:
        process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
async def test_it_learns_stops_and_goes_on(folder: Path, tiny: Path) -> None:
    """One rank learns and is stopped while it waits; two ranks go on from its checkpoint until the feed is over."""
    rollouts = Rollouts(tiny, last=12, over=None)
    server = FeedServer(rollouts, Events(rollouts))
    url = await server.start()
    try:
        await server.begin(1)
        process = await start(a_job(folder, tiny, url), server, folder, 1)
        try:
            await asyncio.wait_for(rollouts.idle.wait(), SECONDS)
            process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), SECONDS)
        finally:
            await gone(process)
        log = (folder / "log-1").read_text()
        assert code == 0, log[-3000:]
        assert "told to stop" in log
    finally:
        await server.stop()

    rewards = [r.metrics["reward/mean"] for r in rollouts.reports]
    assert [r.version for r in rollouts.reports] == [f"1.{n}" for n in range(1, 13)]
    assert np.mean(rewards[:2]) < 0.65  # type: ignore[arg-type]
    assert np.mean(rewards[-2:]) > 0.85, rewards  # type: ignore[arg-type]
    first = rollouts.reports[0].metrics
    assert first["behaviour/weight_mean"] == pytest.approx(1, abs=1e-3), "log-probs of trainer and sampler differ"
    assert first["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert first["tokens/trained"] == GROUPS * SAMPLES * ANSWER
    assert {p.phase for p in rollouts.phases} >= {"load", "take"}
    assert [(c.step, c.take, c.cursor) for c in rollouts.checkpoints] == [(n, n, {"row": n * GROUPS}) for n in (5, 10)]

    saved, refused = checkpoint.newest(folder / "checkpoints")
    assert saved is not None
    assert not refused
    assert (saved.step, saved.version) == (10, "1.10")

    again = Rollouts(saved.model, last=12, over="enough")
    server = FeedServer(again, Events(again))
    url = await server.start()
    try:
        await server.begin(2)
        train = TRAIN.model_copy(update={"minibatches": 2})
        job = a_job(folder, tiny, url, incarnation=2, resume=saved.path, train=train)
        process = await start(job, server, folder, 2)
        try:
            code = await asyncio.wait_for(process.wait(), SECONDS)
        finally:
            await gone(process)
        assert code == 0, (folder / "log-2").read_text()[-3000:]
    finally:
        await server.stop()
    assert [w.version for w in again.weights] == ["2.10", "2.11", "2.12"]
    assert [r.step for r in again.reports] == [11, 12]
    assert same_weights(saved.model, Path(again.weights[0].path))
    assert again.reports[0].metrics["behaviour/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert again.reports[0].metrics["reward/mean"] > 0.85  # type: ignore[operator]
    assert [c.step for c in again.checkpoints] == [12], "the end of the run is a checkpoint"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-0000010", "step-0000012"]


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.timeout(2 * SECONDS)
async def test_a_job_that_cannot_work_ends_with_its_cause(folder: Path) -> None:
    (folder / "empty").mkdir()
    job = a_job(folder, folder / "empty", "http://127.0.0.1:9")
    file = folder / "trainer.json"
    file.write_text(job.model_dump_json(exclude_unset=True))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agentrl.train",
        str(file),
        env={**os.environ, "AGENTRL_TOKEN": "x"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, text = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        await gone(process)
    assert process.returncode == 1
    assert "config.json" in text.decode().splitlines()[-1]
