"""The ledger checker finds what it is there to find: each fault is put into a sound run by hand."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.rollout.pool import Pool
from agentrl.rollout.records import Ask, TakeRule
from agentrl.types import Episode, Group, Sampled, Segment, Stop, Trajectory, Turn, Version

SCRIPT = Path(__file__).parents[2] / "examples" / "ledger.py"


def group_of(position: int, label: str) -> Group:
    segment = Segment(np.arange(4, dtype=np.int32), np.full(4, -0.5, np.float32), Sampled(Version.parse(label)))
    episode = Episode(position, 0, 0, 5, {}, (), (Turn(0, 0, 4, 1.0),), (Trajectory((segment,)),), Stop.FINISHED)
    return Group(position, 0, 0, "env", (episode,))


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """Three steps, a trainer that died, and one step done again under the second incarnation."""
    (tmp_path / "config.toml").write_text("[rollout]\nstaleness = 1\n")
    lines: list[dict[str, Any]] = []
    pool = await Pool.open(tmp_path / "pool.sqlite")
    rule = TakeRule(batch=1, staleness=1, wait=True, max_asks=3)
    cursor = None

    async def step(number: int, incarnation: int, *positions: int) -> None:
        nonlocal cursor
        for position in positions:
            pool.ask(Ask(position, 0))
            assert await pool.put(group_of(position, f"{incarnation}.{number - 1}"))
        version = Version(incarnation, number - 1)
        _, take = await pool.take(number, version, rule)
        assert take is not None
        told = {"kind": "take", "step": number, "version": str(version), "take": take.id, "groups": list(take.ids)}
        lines.extend([told, {"kind": "step", "step": number, "version": f"{incarnation}.{number}"}])
        cursor = take.cursor if number == 2 else cursor
        await pool.published(Version(incarnation, number), rule)

    lines.append({"kind": "begin", "step": 0, "version": "1.0", "take": 0})
    await pool.resume(Version(1, 0))
    for number in (1, 2, 3):
        await step(number, 1, number - 1)
    lines.append({"kind": "begin", "step": 2, "version": "2.2", "take": 2})
    await pool.resume(Version(2, 2), cursor)
    await step(3, 2)  # the group whose take was undone
    await step(4, 2, 3)
    await pool.close()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    return tmp_path


def verdict(run: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([sys.executable, str(SCRIPT), str(run)], capture_output=True, text=True, timeout=100)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def in_pool(run: Path, statement: str, *values: Any) -> None:
    db = sqlite3.connect(run / "pool.sqlite")
    with db:
        assert db.execute(statement, values).rowcount == 1
    db.close()


def edit_metrics(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_sound_run_passes(run: Path) -> None:
    code, found = verdict(run)
    assert code == 0, found
    assert (found["steps"], found["steps_abandoned"], found["groups_trained"]) == (4, 1, 4)
    assert found["tokens_trained"] == 16
    assert found["oldest_token"] == 0


def make_lost(run: Path) -> None:
    in_pool(run, "UPDATE positions SET state = 'waiting' WHERE position = 0")


def make_missing(run: Path) -> None:
    in_pool(run, "DELETE FROM positions WHERE position = 1")


def make_twice(run: Path) -> None:
    in_pool(run, "UPDATE takes SET positions = '[0]' WHERE step = 4")
    edit_metrics(run, lambda lines: lines[-2].update(groups=[0]))


def make_stale(run: Path) -> None:
    in_pool(run, "UPDATE takes SET number = 5 WHERE step = 4")
    edit_metrics(run, lambda lines: lines[-2].update(version="2.5"))


def make_abandoned(run: Path) -> None:
    from agentrl.wire import encode_group

    body = encode_group(group_of(3, "1.3"), messages=False)
    in_pool(run, "UPDATE groups SET body = ? WHERE position = 3", body)


def make_gap(run: Path) -> None:
    edit_metrics(run, lambda lines: lines.__delitem__(4))


def make_silent_end(run: Path) -> None:
    in_pool(run, "UPDATE positions SET state = 'filtered', reason = '' WHERE position = 3")


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (make_lost, "lost"),
        (make_missing, "positions_missing"),
        (make_twice, "trained_twice"),
        (make_stale, "tokens_over_staleness"),
        (make_abandoned, "tokens_of_abandoned_weights"),
        (make_gap, "gaps_in_steps"),
        (make_silent_end, "ended_without_reason"),
    ],
)
def test_each_fault_is_found(run: Path, spoil: Callable[[Path], None], name: str) -> None:
    spoil(run)
    code, found = verdict(run)
    assert code == 1
    assert found[name] > 0, found
