"""`agentrl view` and `agentrl report` as commands."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.errors import ConfigError
from agentrl.monitor.sample import Shape, make_sample_run
from agentrl.monitor.serve import serve


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sums"
    make_sample_run(folder, Shape(steps=2, groups=2, samples=2))
    return folder


def test_a_folder_that_is_no_run_is_told_in_one_message(tmp_path: Path) -> None:
    for command in (["view", str(tmp_path)], ["report", str(tmp_path)]):
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 2
        assert "is no run's folder" in found.output
        assert "Traceback" not in found.output


async def test_a_taken_port_is_named(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve([run], host="127.0.0.1", port=port, token=None, on_ready=lambda _: None, stop=asyncio.Event())


def test_it_prints_its_address_asks_for_its_token_and_ends_when_told(run: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "view", str(run), "--host", "0.0.0.0"]
    environment = {**os.environ, "AGENTRL_PAGE_TOKEN": "a-token-of-ours"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url, _, token = process.stdout.readline().strip().partition("?token=")
        assert token == "a-token-of-ours"
        asked = urllib.request.Request(f"{url}metrics", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert answer.read().endswith(b"# EOF\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_report_lies_in_the_run_unless_told_otherwise(run: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert (run / "report.html").stat().st_size > 10_000
    found = CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "missing" / "x.html")])
    assert found.exit_code == 1
    assert "cannot be written" in found.output
