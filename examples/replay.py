"""Trains again what a run trained, from its first checkpoint and out of its pool, and compares the losses.

    python examples/replay.py runs/my-run

The groups of every surviving take must still be stored (`train.keep_checkpoints` larger than the run has). Nothing of
the run is changed. The last line is JSON; the exit code is 1 where a loss differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.conductor.feed import Batch, CheckpointReady, FeedServer, Phase, RunIsOver, StepMetrics, WeightsReady
from agentrl.conductor.trainer import TrainerGroup
from agentrl.monitor.metrics import read_metrics
from agentrl.train.checkpoint import read
from agentrl.train.options import TrainerJob
from agentrl.types import Version
from agentrl.wire import decode_group

COMPARED = ("loss", "grad_norm")
TOLERANCE = 1e-4


class Replayed:
    """The stored takes as a source of batches; collects what the trainer measures."""

    def __init__(self, pool: Path) -> None:
        self._db = sqlite3.connect(f"file:{pool}?mode=ro", uri=True)
        self.measured: dict[int, dict[str, Any]] = {}

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        """The batch of `step`."""
        row = self._db.execute("SELECT id, positions, cursor FROM takes WHERE step = ?", (step,)).fetchone()
        if row is None:
            raise RunIsOver("all stored takes were replayed")
        take, positions, cursor = row[0], json.loads(row[1]), json.loads(row[2])
        found = "SELECT body FROM groups WHERE position = ?"
        bodies = [self._db.execute(found, (position,)).fetchone()[0] for position in positions]
        return Batch(take, [decode_group(body) for body in bodies], cursor, bodies=bodies)

    async def weights(self, ready: WeightsReady) -> None:
        """Nobody needs them."""
        await asyncio.to_thread(shutil.rmtree, ready.path)

    async def metrics(self, report: StepMetrics) -> None:
        """Keep them."""
        self.measured[report.step] = dict(report.metrics)

    async def checkpoint(self, ready: CheckpointReady) -> None:
        """The last one; goes with the folder."""

    async def phase(self, phase: Phase) -> None:
        """Alive."""


def first_losses(run: Path) -> dict[int, dict[str, Any]]:
    """What the run measured, by step; of a step that was done again, the last."""
    return {line["step"]: line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"}


async def replay(run: Path, scratch: Path) -> dict[str, Any]:
    """Run the trainer over the stored takes and compare."""
    checkpoint = read(min((run / "checkpoints").glob("step-*")))
    source = Replayed(run / "pool.sqlite")
    feed = FeedServer(source, source)
    url = await feed.start()
    incarnation = int((run / "incarnation").read_text()) + 1
    await feed.begin(incarnation)
    for name in ("weights", "checkpoints"):
        (scratch / name).mkdir()
    changed = {
        "feed_url": url,
        "weights_dir": scratch / "weights",
        "checkpoints_dir": scratch / "checkpoints",
        "incarnation": incarnation,
        "resume": checkpoint.path,
    }
    job = TrainerJob.model_validate_json((run / "trainer.json").read_bytes()).model_copy(update=changed)
    group = TrainerGroup(job, scratch / "trainer.json", scratch / "trainer.log", feed.token)
    try:
        death = await group.ended()
    finally:
        await group.child.stop()
        await feed.stop()
    if death is not None:
        raise RuntimeError(death.text)
    told = first_losses(run)
    differences = {
        step: max(_difference(told[step][name], again[name]) for name in COMPARED)
        for step, again in source.measured.items()
    }
    return {
        "replayed_from_step": checkpoint.step,
        "replayed_steps": len(differences),
        "replay_largest_difference": max(differences.values(), default=0.0),
        "replay_differing": sorted(step for step, d in differences.items() if d > TOLERANCE),
    }


def _difference(a: float, b: float) -> float:
    """Relative, and absolute below 1: metrics.jsonl rounds to six digits."""
    return abs(a - b) / max(1.0, abs(a))


def main() -> int:
    """Replay one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(replay(parser.parse_args().run, Path(scratch)))
    print(json.dumps(found))
    return 1 if found["replay_differing"] or not found["replayed_steps"] else 0


if __name__ == "__main__":
    sys.exit(main())
