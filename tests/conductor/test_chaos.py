"""Runs that are killed in every way, and then have to prove by an independent ledger that nothing was lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.train.checkpoint import newest
from tests.conductor.kit import finished, kill_child, lines, make_place, start, wait_for, wait_for_none

EXAMPLES = Path(__file__).parents[2] / "examples"


def last_json(*arguments: str, seconds: float = 200) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kind_of_kill_once_and_nothing_is_lost(tmp_path: Path) -> None:
    settings = ("--kills", "6", "--every", "1", "--when-stale", "drop", "--keep", str(tmp_path))
    found = last_json(str(EXAMPLES / "chaos.py"), *settings, seconds=800)
    assert found["kills"] == 6
    assert found["conductor_starts"] >= 3
    assert found["steps"] > 4
    assert found["replayed_steps"] > 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_through_the_conductor_and_one_of_them_killed(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    run = place / "runs" / "r"
    settings = ["train.ranks=2", "train.steps=14", "train.checkpoint_every=2", "train.keep_checkpoints=99"]
    settings += ["env.args.gate=24", "eval.every=1000"]  # each start gets through six steps, until it is let go
    process = start(place, "train", "run.toml", *settings)
    wait_for(lambda: len(lines(run, "checkpoint")) >= 2, process)
    # Ranks live in sessions of their own, and a stopped one does nothing by itself.
    kill_child(process.pid, "agentrl.train", signal.SIGSTOP)
    process.kill()
    process.communicate()
    wait_for_none(place)
    process = start(place, "train", "run.toml", "--resume", *settings)
    wait_for(lambda: lines(run, "step")[-1]["version"].startswith("2."), process)
    kill_child(process.pid, "agentrl.train")
    (place / "go").touch()
    code, output = finished(process)
    assert code == 0, output
    (fault,) = lines(run, "fault")
    assert fault["what"] == "trainer"
    assert re.search(r"rank \d was killed by SIGKILL", fault["error"]), "not the rank that lost it"
    assert lines(run, "step")[-1]["version"] == "3.14"
    wait_for_none(place)
    assert last_json(str(EXAMPLES / "ledger.py"), str(run))["steps"] == 14
    assert last_json(str(EXAMPLES / "replay.py"), str(run))["replayed_steps"] == 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_disk_that_is_full_at_the_checkpoint_costs_no_group(tmp_path: Path) -> None:
    # Weights fit below the limit, master weights with moments do not.
    place = make_place(tmp_path, layers=2, hidden=128, intermediate=512)
    weights = (place / "model" / "model.safetensors").stat().st_size
    limited = ["bash", "-c", f'ulimit -f {2 * weights // 1024}; exec "$@"', "limited"]
    settings = ("eval.every=1000", "train.checkpoint_every=2", "train.steps=4")
    code, output = finished(start(place, "train", "run.toml", *settings, before=limited))
    run = place / "runs" / "r"
    assert code == 1, output
    assert re.search(r"checkpoints/.* could not be written: .*File too large", output), output
    assert "Traceback" not in output
    assert newest(run / "checkpoints") == (None, [])
    code, output = finished(start(place, "train", "run.toml", "--resume", *settings))
    assert code == 0, output
    assert lines(run, "step")[-1]["step"] == 4
    assert last_json(str(EXAMPLES / "ledger.py"), str(run))["groups_trained"] == 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_that_is_stopped_while_it_loads_is_missed(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    run = place / "runs" / "r"
    settings = ("eval.every=1000", "monitor.silent_seconds=15", "train.steps=2", "env.args.gate=4")
    process = start(place, "train", "run.toml", *settings)
    # Beats begin before torch, which takes seconds.
    wait_for(lambda: "'load'" in state_of(run) or "'start'" in state_of(run), process)
    kill_child(process.pid, "agentrl.train", signal.SIGSTOP)
    (place / "go").touch()
    code, output = finished(process)
    assert code == 0, output
    (fault,) = lines(run, "fault")
    assert "has been silent for 15 s" in fault["error"]
    assert lines(run, "step")[-1]["version"] == "2.2"


def state_of(run: Path) -> str:
    path = run / "state.json"
    return path.read_text() if path.exists() else ""
