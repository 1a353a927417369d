"""A run over three hosts, as the tests start it, strike it and judge it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.hosts import Host
from tests.conductor.kit import lines

PORT = 7700
PATIENCE = 200.0
"""For anything to come about; a shared machine may be many times slower than a quiet one."""
CLUSTER = """
[cluster]
kind = "external"
host = "10.77.0.1"
rollout_workers = {rollouts}
slow_seconds = 30
lost_seconds = {lost}
"""


class Cluster(NamedTuple):
    place: Path
    conductor: Host
    a: Host
    b: Host

    @property
    def url(self) -> str:
        return f"http://{self.conductor.address}:{PORT}"

    @property
    def run(self) -> Path:
        return self.place / "runs" / "r"

    def train(self, *settings: str, rollouts: int = 0, lost: float = 6.0) -> subprocess.Popen[bytes]:
        config = self.place / "run.toml"
        config.write_text(config.read_text() + CLUSTER.format(rollouts=rollouts, lost=lost))
        common = ("monitor.trainer_restarts=1000", "monitor.engine_restarts=1000")
        return self.conductor.start("conductor", "train", "run.toml", *common, *settings, cwd=self.place)

    def lend(self, host: Host, *roles: str) -> None:
        for role in roles:
            host.worker(role, self.url, self.place)

    def output(self) -> str:
        return "".join(f"== {log.name}\n{log.read_text()[-3000:]}\n" for log in sorted(self.place.glob("*.log")))

    def steps(self) -> int:
        return len(lines(self.run, "step"))

    def until(self, what: Callable[[], object], conductor: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + PATIENCE
        while not what():
            assert conductor.poll() is None, self.output()
            assert time.monotonic() < end, f"it did not come to that in time\n{self.output()}"
            time.sleep(0.1)


def ledger(run: Path) -> dict[str, Any]:
    script = Path(__file__).parents[2] / "examples" / "ledger.py"
    done = subprocess.run([sys.executable, str(script), str(run)], capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"], found
    return found
