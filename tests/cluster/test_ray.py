"""The launcher `ray` where Ray is not installed; with it: test_ray_hosts.py."""

from __future__ import annotations

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


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = RunFolder(tmp_path)
    config = RunConfig(name="r", model=tmp_path, env=EnvSection(path="x:Y"), cluster=ClusterOptions(kind="ray"))
    desk = Desk(folder, MetricsFile(folder.metrics), make_view("r", 1), logging.getLogger("r"))
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[ray\]'"):
        RayLauncher(config, desk, tmp_path)
    desk.metrics.close()
