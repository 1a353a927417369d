"""A run on a Ray cluster of this machine."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.ray import RayLauncher
from agentrl.conductor.config import EnvSection, RunConfig
from agentrl.conductor.desk import Desk
from agentrl.conductor.folder import RunFolder
from agentrl.errors import ConfigError
from agentrl.monitor.live import make_view
from agentrl.monitor.metrics import MetricsFile
from tests.conductor.kit import finished, lines, make_place, start

SETTINGS = (
    "cluster.kind=ray",
    "cluster.ray_engine={CPU=0.1}",
    "cluster.ray_trainer={CPU=0.1}",
    "cluster.ray_rollout={CPU=0.1}",
    "cluster.rollout_workers=1",
    "cluster.lost_seconds=60",
    "train.ranks=2",
    "engine.count=2",
    "eval.every=1000",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'agentrl[ray]'")
def test_a_run_placed_by_ray(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    run = place / "runs" / "r"
    process = start(place, "train", "run.toml", *SETTINGS, "train.steps=4")
    code, output = finished(process, 500)
    assert code == 0, output
    assert [s["version"] for s in lines(run, "step")] == ["1.1", "1.2", "1.3", "1.4"]
    assert lines(run, "step")[0]["behaviour/abs_log_weight_max"] < 1e-3


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = RunFolder(tmp_path)
    config = RunConfig(name="r", model=tmp_path, env=EnvSection(path="x:Y"), cluster=ClusterOptions(kind="ray"))
    desk = Desk(folder, MetricsFile(folder.metrics), make_view("r", 1), logging.getLogger("r"))
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[ray\]'"):
        RayLauncher(config, desk, tmp_path)
    desk.metrics.close()
