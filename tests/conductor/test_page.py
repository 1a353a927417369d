"""The run's own page: started with it, ended with it, and never its master."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agentrl.conductor.config import MonitorSection, RunConfig, SftConfig
from agentrl.conductor.desk import Desk, close_log, open_log
from agentrl.conductor.folder import RunFolder
from agentrl.conductor.page import PageProcess, check_monitor, page_file
from agentrl.errors import ConfigError
from agentrl.monitor.live import Lines, make_view
from agentrl.monitor.metrics import MetricsFile


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    folder = RunFolder(tmp_path / "run")
    folder.open(resume=False)
    folder.config.write_text("")
    made = Desk(folder, MetricsFile(folder.metrics), make_view("run", 3), open_log(folder))
    assert isinstance(made.view, Lines)
    yield made
    made.metrics.close()
    close_log(made.log)
    folder.close()


def answer(url: str) -> str:
    end = time.monotonic() + 100
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return str(reply.read().decode())
        except OSError:
            assert time.monotonic() < end, "the page did not come up"
            time.sleep(0.1)


def test_the_page_lives_as_long_as_the_run_says(desk: Desk) -> None:
    page = PageProcess(desk, MonitorSection())
    file = page_file(desk.folder.path)
    assert file.stat().st_mode & 0o777 == 0o600
    url = file.read_text().strip()
    assert url.startswith("http://127.0.0.1:")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", urlsplit(url).port))  # it is kept, though nobody may listen yet
    assert '"alive":true' in answer(url + "api/runs")
    page.stop()
    assert not file.exists()
    gone = False
    end = time.monotonic() + 60
    while not gone:
        assert time.monotonic() < end, "the page outlived its run"
        try:
            urllib.request.urlopen(url, timeout=30).close()
        except OSError:
            gone = True


def test_switched_off_there_is_none(desk: Desk) -> None:
    page = PageProcess(desk, MonitorSection(page=False))
    page.stop()
    assert not page_file(desk.folder.path).exists()
    assert not (desk.folder.logs / "page.log").exists()


def test_beyond_loopback_the_address_carries_a_token(desk: Desk) -> None:
    page = PageProcess(desk, MonitorSection(page_host="0.0.0.0"))
    url = page_file(desk.folder.path).read_text().strip()
    page.stop()
    assert "?token=" in url
    assert len(url.partition("=")[2]) >= 20


def test_a_taken_port_is_named_before_the_run() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"monitor.page_port = {port}.*monitor.page = false"):
            check_monitor(MonitorSection(page_port=port))
        check_monitor(MonitorSection(page=False))


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="page_port has no effect with page = false"):
        MonitorSection(page=False, page_port=80)
    whole = {"name": "r", "model": "m", "sft": {"data": "x"}, "monitor": {"keep_mb": 5}}
    with pytest.raises(ValueError, match="keep_mb has no effect"):
        SftConfig.model_validate(whole)
    assert RunConfig.model_fields["monitor"].default.keep_mb > 0
