"""Rolling out without a trainer, and training from what was saved without engines."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl.conductor.feed import RunIsOver
from agentrl.conductor.saved import SavedGroups
from agentrl.errors import ConfigError
from agentrl.monitor.metrics import read_metrics
from agentrl.rollout.pool import Pool
from agentrl.types import Sampled, Version
from tests.conductor.kit import PATIENCE, make_place, start, wait_for
from tests.train.drawing import random_group


async def fill(path: Path, count: int) -> None:
    pool = await Pool.open(path)
    await pool.resume(Version(3, 0))
    rng = np.random.default_rng(0)
    for position in range(count):
        await pool.put(random_group(position, rng, samples=2))
    await pool.close()


async def test_batches_follow_from_their_step_and_count_as_sampled_at_the_start(tmp_path: Path) -> None:
    await fill(tmp_path / "pool.sqlite", 5)
    saved = SavedGroups(tmp_path, 2)
    assert len(saved) == 5
    batches = [await saved.take(step, Version(7, step - 1), 1.0) for step in (1, 2, 3, 4)]
    assert [[g.id for g in batch.groups] for batch in batches if batch] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    again = await saved.take(2, Version(8, 1), 1.0)
    assert again is not None
    assert [g.id for g in again.groups] == [2, 3]
    sources = [s.source for g in again.groups for e in g.episodes for t in e.trajectories for s in t.segments]
    assert {s.version for s in sources if isinstance(s, Sampled)} == {Version(8, 0)}


async def test_epochs_end_the_run(tmp_path: Path) -> None:
    await fill(tmp_path / "pool.sqlite", 5)
    saved = SavedGroups(tmp_path / "pool.sqlite", 2, epochs=1)
    assert await saved.take(2, Version(1, 1), 1.0) is not None
    with pytest.raises(RunIsOver, match="all 5 saved groups"):
        await saved.take(3, Version(1, 2), 1.0)


def test_what_is_no_pool_or_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a pool"):
        SavedGroups(tmp_path / "pool.sqlite", 2)
    asyncio.run(fill(tmp_path / "pool.sqlite", 1))
    with pytest.raises(ConfigError, match=r"stores 1 groups, a batch is train.batch_groups = 2"):
        SavedGroups(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_roll_out_then_train_from_the_pool(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    played = start(place, "rollout", "run.toml", "--groups", "5", 'name="played"', "env.args.gate=6")
    state = place / "runs/played/state.json"
    wait_for(lambda: state.exists() and "engine_requests_in_flight" in state.read_text(), played)
    assert json.loads(state.read_text())["phase"] == "rolling out"
    (place / "go").touch()
    said, _ = played.communicate(timeout=PATIENCE)
    assert played.returncode == 0, said
    with closing(sqlite3.connect(place / "runs/played/pool.sqlite")) as db:
        assert db.execute("SELECT COUNT(*) FROM groups").fetchone()[0] >= 5
    (told,) = [line for line in read_metrics(place / "runs/played/metrics.jsonl") if line["kind"] == "rollout"]
    assert told["groups"] == 6, "in whole batches of two"
    assert told["reward_mean"] > 0
    assert not (place / "runs/played/checkpoints").exists() or not any((place / "runs/played/checkpoints").iterdir())
    trained = start(place, "replay", "run.toml", "--pool", "runs/played", 'name="trained"', "train.checkpoint_every=0")
    said, _ = trained.communicate(timeout=PATIENCE)
    assert trained.returncode == 0, said
    steps = [line for line in read_metrics(place / "runs/trained/metrics.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    # The first weights are those that sampled: what they say now is what they said then.
    assert steps[0]["kl/behaviour"] == pytest.approx(0, abs=1e-6)
    assert "reward/mean" in steps[0]
    assert not list((place / "runs/trained/logs").glob("engine*"))
    before, after = (load_file(place / folder / "model.safetensors") for folder in ("model", "runs/trained/model"))
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    assert json.loads((place / "runs/trained/state.json").read_text())["phase"] == "finished"
