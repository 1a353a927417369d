"""Where metrics go besides metrics.jsonl."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.monitor import trackers
from agentrl.monitor.metrics import MetricsFile
from agentrl.monitor.trackers import Trackers, check_trackers, figures_of

LINE = {"kind": "step", "step": 3, "time": 5.0, "loss": 0.5, "version": "1.3", "envs": {"A": {"reward": 1, "n": None}}}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 100.0)  # a slow machine imports slowly


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_figures_are_the_numbers_of_a_line() -> None:
    assert figures_of(LINE) == {"loss": 0.5, "envs/A/reward": 1.0}


def test_tensorboard_gets_every_step_and_evaluation(tmp_path: Path) -> None:
    needs("tensorboard")
    told: list[str] = []
    lanes = Trackers(["tensorboard"], tmp_path, {}, told.append)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", lanes.put)
    metrics.write("step", {"step": 1, "loss": 0.5})
    metrics.write("publish", {"step": 1, "publish/seconds": 1.0})
    metrics.write("eval", {"step": 1, "eval/reward": 0.25})
    metrics.close()
    lanes.close()
    assert told == []
    loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = {}
    for event in loader.LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found[event.step, value.tag] = value.simple_value
    assert found == {(1, "loss"): 0.5, (1, "eval/reward"): 0.25}


class Broken:
    """A tracker whose service went away."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self.threads = {threading.current_thread().name}

    def log(self, step: int, figures: Mapping[str, float], time: float) -> None:
        raise ConnectionError("the service went away")

    def close(self) -> None:
        raise AssertionError("a broken tracker is left behind")


def test_a_tracker_that_fails_is_told_and_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "KINDS", {"broken": Broken})
    told: list[str] = []
    lanes = Trackers(["broken"], tmp_path, {}, told.append)
    for _ in range(3):
        lanes.put(LINE)
    lanes.close()
    assert told == ["broken gets no more figures: ConnectionError: the service went away"]


def test_a_tracker_that_is_not_installed_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "PACKAGES", {"wandb": "no_such_package"})
    with pytest.raises(ConfigError, match=r"names 'wandb', which is not installed: pip install no_such_package"):
        check_trackers(["wandb"])
    check_trackers([])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_wandb_offline_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    for name, value in (
        ("MODE", "offline"),
        ("SILENT", "true"),
        ("CONFIG_DIR", str(tmp_path)),
        ("CACHE_DIR", str(tmp_path)),
    ):
        monkeypatch.setenv(f"WANDB_{name}", value)
    told: list[str] = []
    run = tmp_path / "run"
    run.mkdir()
    lanes = Trackers(["wandb"], run, {"seed": 7}, told.append)
    for step in range(1, 4):
        lanes.put({**LINE, "step": step, "loss": 0.5 / step})
    lanes.close()
    assert told == []
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    # Records of protobuf, uncompressed; the reader of this form is no part of wandb's interface. Its own process
    # writes them, a little later than `finish` returns.
    wanted = [str(0.5 / step).encode()[:8] for step in range(1, 4)]
    end = time.monotonic() + 100
    while (written := file.read_bytes()).count(b"envs/A/reward") < 3 or any(value not in written for value in wanted):
        assert time.monotonic() < end, "wandb wrote nothing"
        time.sleep(0.1)


TRACKIO = """
import sys
from pathlib import Path
from agentrl.monitor import trackers

trackers.CLOSE_SECONDS = 100.0
told = []
for steps in ((1, 2), (3,)):
    lanes = trackers.Trackers(["trackio"], Path(sys.argv[1]), {"seed": 7}, told.append)
    for step in steps:
        lanes.put({"kind": "step", "step": step, "time": 5.0, "loss": 0.5 / step, "envs": {"A": {"reward": 1}}})
    lanes.close()
assert told == [], told
"""


def test_trackio_gets_every_step_and_a_resume_goes_on_in_the_same_run(tmp_path: Path) -> None:
    needs("trackio")
    # A process of its own: trackio reads where to write when it is imported. No network, no account.
    place = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", TRACKIO, str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(tmp_path / "trackio" / "agentrl.db")) as base:
        rows = base.execute("SELECT step, run_name, metrics FROM metrics ORDER BY step").fetchall()
    assert [(step, json.loads(figures)) for step, _, figures in rows] == [
        (step, {"loss": 0.5 / step, "envs/A/reward": 1.0}) for step in (1, 2, 3)
    ]
    assert len({name for _, name, _ in rows}) == 1
    assert rows[0][1].startswith("run-")
