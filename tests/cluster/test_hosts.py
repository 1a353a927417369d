"""Whole runs over three hosts, and what may befall a host. The ledger is the judge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import Host, make_hosts, why_not
from tests.conductor.kit import lines, make_place

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


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    place = make_place(tmp_path)
    with make_hosts(("c", "a", "b"), place) as (c, a, b):
        yield Cluster(place, c, a, b)


def ledger(run: Path) -> dict[str, Any]:
    script = Path(__file__).parents[2] / "examples" / "ledger.py"
    done = subprocess.run([sys.executable, str(script), str(run)], capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"], found
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_over_three_hosts_with_nothing_shared(cluster: Cluster) -> None:
    conductor = cluster.train("train.ranks=2", "train.steps=4", "engine.count=2", rollouts=1, lost=60.0)
    cluster.lend(cluster.a, "engine", "trainer", "rollout")
    cluster.lend(cluster.b, "engine", "trainer")
    assert conductor.wait(PATIENCE) == 0, cluster.output()
    steps = lines(cluster.run, "step")
    assert [s["version"] for s in steps] == ["1.1", "1.2", "1.3", "1.4"]
    assert steps[0]["behaviour/abs_log_weight_max"] < 1e-3, "trainer and engines agree on the log-probs of version 0"
    assert lines(cluster.run, "publish")[-1]["version"] == "1.4"
    assert ledger(cluster.run)["steps"] == 4
    assert (cluster.run / "model" / "model.safetensors").stat().st_size > 0
    for worker in (*cluster.a.started, *cluster.b.started):
        assert worker.wait(30) == 0, cluster.output()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_that_is_cut_off_frozen_or_lost_costs_nothing_but_time(cluster: Cluster) -> None:
    conductor = cluster.train(
        "train.ranks=1", "train.steps=100000", "train.checkpoint_every=1", "train.keep_checkpoints=9999",
        "eval.every=1000", "engine.count=2", "rollout.staleness=2",
    )  # fmt: skip
    for host in (cluster.a, cluster.b):
        cluster.lend(host, "engine", "trainer")
    cluster.until(lambda: cluster.steps() >= 2, conductor)

    def lost(host: Host) -> int:
        text = (cluster.run / "logs" / "conductor.log").read_text()
        return sum(f"{host.address} is lost" in line for line in text.splitlines())

    def goes_on() -> None:
        before = cluster.steps()
        cluster.until(lambda: cluster.steps() >= before + 2, conductor)

    def serves(host: Host) -> int:
        text = (cluster.run / "logs" / "conductor.log").read_text()
        return text.count(f"engine worker {host.short}-engine serves")

    def strikes(host: Host, strike: Callable[[Host], None], heal: Callable[[Host], None]) -> None:
        before = lost(host)
        strike(host)
        cluster.until(lambda: lost(host) >= before + 2, conductor)
        goes_on()
        heal(host)

    served = serves(cluster.a)
    strikes(cluster.a, Host.cut, Host.mend)
    cluster.until(lambda: serves(cluster.a) > served, conductor)
    strikes(cluster.b, Host.freeze, Host.thaw)  # from here on the rank is on `a`, wherever it was before
    cluster.a.kill()
    goes_on()
    conductor.send_signal(signal.SIGINT)
    conductor.wait(60)
    found = ledger(cluster.run)
    assert found["incarnations"] >= 3
    assert found["steps"] > 6


@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.skipif("AGENTRL_SGLANG_PYTHON" not in os.environ, reason="set AGENTRL_SGLANG_PYTHON")
def test_a_real_sglang_on_another_host(cluster: Cluster) -> None:
    python = os.environ["AGENTRL_SGLANG_PYTHON"]
    sglang = ("engine.kind=sglang", f"engine.python={python}", "engine.max_running=8")
    conductor = cluster.train(*sglang, "train.steps=2", "eval.every=1000", lost=60.0)
    cluster.lend(cluster.a, "engine")
    cluster.lend(cluster.b, "trainer")
    assert conductor.wait(800) == 0, cluster.output()
    steps = lines(cluster.run, "step")
    assert [s["version"] for s in steps] == ["1.1", "1.2"]
    assert steps[0]["behaviour/abs_log_weight_max"] < 1e-3, "trainer and SGLang agree on the log-probs of version 0"
    assert lines(cluster.run, "publish")[-1]["version"] == "1.2"
    assert ledger(cluster.run)["steps"] == 2
