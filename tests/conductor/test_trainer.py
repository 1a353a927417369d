"""When a trainer's group hangs, as its heartbeats tell."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.conductor import trainer, watchdog
from agentrl.conductor.cause import Death, remedy
from agentrl.conductor.feed import Batch, CheckpointReady, FeedServer, Phase, StepMetrics, WeightsReady
from agentrl.conductor.trainer import Heartbeats, TrainerGroup
from agentrl.testing.tiny import make_tiny_model
from agentrl.train.options import AlgorithmOptions, TrainerJob, TrainOptions
from agentrl.types import Version

WAITS = """
import os
import time

from agentrl.train.algorithms.ppo import PPO


class Waits(PPO):
    @property
    def critic(self):
        if os.environ["RANK"] == "1":
            time.sleep(3600)
        return False
"""


def beat(rank: int, phase: str = "load", still: float = 40.0) -> Phase:
    return Phase(rank=rank, phase=phase, step=0, still=still, where=f"wait (place.py:{rank})")


def test_ranks_that_all_stand_still_in_their_load_hang() -> None:
    beats = Heartbeats(2, 90.0, 30.0)
    beats.heard(beat(0))
    assert beats.hangs() is None, "the other one has not come yet, for whatever honest reason"
    beats.heard(beat(1, still=29.0))
    assert beats.hangs() is None
    beats.heard(beat(1, still=31.0))
    hangs = beats.hangs()
    assert hangs == (
        "all 2 trainer ranks have stood still in 'load' for 31 s, reading and computing nothing: each waits for "
        "another (rank 0 in wait (place.py:0); rank 1 in wait (place.py:1))"
    )
    assert "reach each other" in remedy(hangs, "")


@pytest.mark.parametrize("phase", ["start", "take", "weights", "checkpoint"])
def test_ranks_may_wait_for_others_than_ranks(phase: str) -> None:
    beats = Heartbeats(2, 90.0, 30.0)
    beats.heard(beat(0))
    beats.heard(beat(1, phase))
    assert beats.hangs() is None


def test_one_rank_waits_for_no_other() -> None:
    beats = Heartbeats(1, 90.0, 30.0)
    beats.heard(beat(0, still=4000.0))
    assert beats.hangs() is None


def test_a_rank_that_never_says_anything_is_missed_though_others_do() -> None:
    beats = Heartbeats(3, 90.0)
    assert beats.hangs(60.0) is None
    assert beats.hangs(-1.0) == "the trainer gave no sign of life within -1 s of its start"
    beats.heard(beat(0, "start"))
    beats.heard(beat(2, "start"))
    assert beats.hangs(-1.0) == "trainer rank 1 of 3 gave no sign of life within -1 s of its start"
    beats.heard(beat(1, "start"))
    assert beats.hangs(-1.0) is None


def test_silence_counts_only_while_the_conductor_itself_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by hand and continued, it has heard nobody: that is nobody's fault."""
    now = [0.0]
    for module in (trainer, watchdog):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    beats = Heartbeats(2, 90.0)
    beats.heard(beat(0, "train"))
    now[0] = 3600.0
    assert beats.hangs() is None, "nor is the other one late"
    while (hangs := beats.hangs()) is None:
        now[0] += 0.5
    assert (now[0], hangs) == (3690.5, "trainer rank 0 has been silent for 90 s in 'train' of step 0")


class Nothing:
    """A feed that has no batch, and passes heartbeats on."""

    group: TrainerGroup

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        await asyncio.sleep(wait)
        return None

    async def weights(self, ready: WeightsReady) -> None: ...

    async def metrics(self, report: StepMetrics) -> None: ...

    async def checkpoint(self, ready: CheckpointReady) -> None: ...

    async def phase(self, phase: Phase) -> None:
        self.group.heard(phase)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_group_whose_ranks_wait_for_each_other_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 hangs within its load, alive in all that its host can see; the limit on collectives is ten minutes."""
    (tmp_path / "waits.py").write_text(WAITS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    make_tiny_model(tmp_path / "model", layers=1, hidden=32, intermediate=32, max_length=64)
    events = Nothing()
    feed = FeedServer(events, events)
    url = await feed.start()
    await feed.begin(1)
    job = TrainerJob(
        run="r",
        train=TrainOptions(ranks=2),
        algorithm=AlgorithmOptions(name="waits:Waits"),
        model_dir=tmp_path / "model",
        feed_url=url,
        weights_dir=tmp_path / "w",
        checkpoints_dir=tmp_path / "c",
    )
    events.group = TrainerGroup(job, tmp_path / "job.json", tmp_path / "log", feed.token, still_seconds=10.0)
    try:
        death = await events.group.ended()
    finally:
        await events.group.stop()
        await feed.stop()
    assert isinstance(death, Death)
    assert not death.own
    assert death.text.startswith("all 2 trainer ranks have stood still in 'load' for ")
    assert "critic (waits.py:" in death.text
    assert "gather (meeting.py:" in death.text
