"""The launcher `ray` where Ray is not installed; with it: test_ray_hosts.py."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.ray import TRIES, RayLauncher, Starts
from agentrl.conductor.config import EnvSection, RunConfig
from agentrl.conductor.desk import Desk
from agentrl.conductor.folder import RunFolder
from agentrl.errors import ConfigError, RunError
from agentrl.monitor.live import make_view
from agentrl.monitor.metrics import MetricsFile


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = RunFolder(tmp_path)
    config = RunConfig(name="r", model=tmp_path, env=EnvSection(path="x:Y"), cluster=ClusterOptions(kind="ray"))
    desk = Desk(folder, MetricsFile(folder.metrics), make_view("r", 1), logging.getLogger("r"))
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[ray\]'"):
        RayLauncher(config, desk, tmp_path)
    desk.metrics.close()


def test_workers_that_are_lost_end_no_run_and_one_that_cannot_run_does() -> None:
    starts = Starts()
    for joins in range(1, 200):  # a rack is lost again and again; between, one start or another comes to nothing
        starts.ended("engine-0", joins, "is gone (node died)")
        starts.ended("engine-0", joins, "is gone (node died)")
        starts.ended("trainer-1", joins, "is gone (node died)")
    for _ in range(TRIES - 1):
        starts.ended("engine-0", 199, "ended with code 2")
    starts.ended("trainer-1", 199, "ended with code 2")
    with pytest.raises(RunError, match=rf"worker engine-0 was started {TRIES + 1} times .* ended with code 2: see"):
        starts.ended("engine-0", 199, "ended with code 2")
