"""What `agentrl doctor` says of this machine is what a pool of that kind does."""

from __future__ import annotations

from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.errors import ConfigError
from tests.sandbox.kinds import pool_of


def test_doctor_tells_which_kinds_work_and_why_not() -> None:
    told = CliRunner().invoke(app, ["doctor", "--docker-url", "unix:///nowhere/docker.sock"])
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    assert any(line.startswith("no     docker") for line in lines)
    assert any("no engine answers at unix:///nowhere/docker.sock" in line for line in lines)
    assert any(line.startswith("works  subprocess") and "NOTHING" in line for line in lines)
    try:
        pool_of("bubblewrap")
        works = True
    except ConfigError:
        works = False
    assert any(line.startswith("works  bubblewrap" if works else "no     bubblewrap") for line in lines)
