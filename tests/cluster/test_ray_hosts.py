"""A run that Ray places on three hosts; an actor, a link, a node is lost or stands still. The ledger judges."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, ip
from tests.cluster.kit import Cluster, ledger
from tests.conductor.kit import lines

RAY = """
[cluster]
kind = "ray"
host = "10.77.0.1"
ray_address = "10.77.0.1:6379"
ray_placement = "SPREAD"
ray_engine = {CPU = 0.1, lent = 1}
ray_trainer = {CPU = 0.1, lent = 1}
ray_rollout = {CPU = 0.1, lent = 1}
rollout_workers = 1
lost_seconds = 4
"""
CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a" * 64,
}
"""How the docs say that Ray is started, so that it misses a node within seconds."""
SETTINGS = (
    "train.ranks=2", "train.steps=100000", "train.checkpoint_every=1", "train.keep_checkpoints=9999",
    "eval.every=1000", "engine.count=2", "rollout.staleness=2", "monitor.trainer_restarts=1000",
    "monitor.engine_restarts=1000",
)  # fmt: skip


def join_ray(cluster: Cluster, host: Host) -> None:
    """A node of Ray's on the host; only those that are lent get work."""
    head = host is cluster.conductor
    role = ("--head", "--port=6379", "--include-dashboard=false") if head else ("--address=10.77.0.1:6379",)
    argv = [str(Path(sys.executable).with_name("ray")), "start", *role, f"--node-ip-address={host.address}"]
    argv += ["--num-cpus=4", "--object-store-memory=80000000", "--disable-usage-stats"]
    argv += [] if head else ['--resources={"lent": 8}']
    done = subprocess.run(
        ["ip", "netns", "exec", host.name, *argv],
        env={**os.environ, **CHECKS},
        cwd=cluster.place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def bearers(host: Host) -> list[int]:
    """Ray's actors on the host, each with a worker as its child."""
    found = []
    for pid in map(int, ip("netns", "pids", host.name).split()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if command.startswith("ray::Bearer"):
            found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'agentrl[ray]'")
def test_what_ray_loses_costs_nothing_but_time(cluster: Cluster) -> None:
    for host in (cluster.conductor, cluster.a, cluster.b):
        join_ray(cluster, host)
    config = cluster.place / "run.toml"
    config.write_text(config.read_text() + RAY)
    env = {**CHECKS, "PYTHONPATH": str(Path(__file__).parents[2])}
    conductor = cluster.conductor.start("conductor", "train", "run.toml", *SETTINGS, cwd=cluster.place, env=env)
    cluster.until(lambda: cluster.steps() >= 2, conductor)
    assert lines(cluster.run, "step")[0]["behaviour/abs_log_weight_max"] < 1e-3
    assert bearers(cluster.a)
    assert bearers(cluster.b)

    def goes_on(lost: int) -> None:
        cluster.until(partial(_lost_since, cluster, lost), conductor)
        steps = cluster.steps()
        cluster.until(lambda: cluster.steps() >= steps + 2, conductor)

    before = _losses(cluster)
    for pid in bearers(cluster.a):
        os.kill(pid, signal.SIGKILL)
    goes_on(before)
    before = _losses(cluster)
    cluster.b.freeze()
    goes_on(before)
    cluster.b.thaw()  # it comes back late: Ray has given the node up, and what ran there ends by itself
    cluster.until(lambda: not bearers(cluster.b), conductor)
    cluster.b.kill()
    join_ray(cluster, cluster.b)
    before = _losses(cluster)
    cluster.a.kill()
    goes_on(before)
    join_ray(cluster, cluster.a)
    before = _losses(cluster)
    cluster.b.cut()  # what runs there ends by itself, and Ray puts new workers on the node that came back
    goes_on(before)
    conductor.send_signal(signal.SIGINT)
    conductor.wait(60)
    assert ledger(cluster.run)["steps"] > 4


def _losses(cluster: Cluster) -> int:
    return (cluster.run / "logs" / "conductor.log").read_text().count(" is lost: ")


def _lost_since(cluster: Cluster, before: int) -> bool:
    return _losses(cluster) > before
