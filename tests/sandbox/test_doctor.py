"""What `agentrl doctor` says of this machine is what a pool of that kind does."""

from __future__ import annotations

from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.errors import ConfigError
from tests.sandbox.kinds import pool_of


def test_doctor_tells_which_kinds_work_and_why_not() -> None:
    told = CliRunner().invoke(app, ["doctor", "--quick", "--docker-url", "unix:///nowhere/docker.sock"])
    lines = told.output.splitlines()
    verdicts = {line[8:23].strip(): line.split()[0] for line in lines if line[:1] != " "}
    assert verdicts["docker"] == "no"
    assert any("no engine answers at unix:///nowhere/docker.sock" in line for line in lines)
    assert verdicts["subprocess"] == "limited", "what contains nothing is never said to work"
    assert any("NOTHING" in line for line in lines)
    try:
        pool_of("bubblewrap")
        works = True
    except ConfigError:
        works = False
    assert verdicts["bubblewrap"] in (("works", "limited") if works else ("no",))
