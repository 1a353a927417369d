"""The launcher `ray` where Ray is not installed; with it: test_ray_hosts.py."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.ray import Ends, RayLauncher
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


def test_a_rack_that_is_lost_ends_no_run_and_workers_that_cannot_run_do() -> None:
    for workers, limit in ((64, 192), (2, 20)):
        ends = Ends(workers)
        for _ in range(limit):
            ends.count(100.0)
        for second in range(161, 1000, 4):
            ends.count(second)  # now and then is no harm
        for _ in range(limit):
            ends.count(2000.0)
        with pytest.raises(RunError, match=f"{limit + 1} workers ended within 60 s"):
            ends.count(2001.0)
