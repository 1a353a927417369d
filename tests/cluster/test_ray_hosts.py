"""A run that Ray places on three hosts: its actors die, and the node that trains is struck. The ledger judges.

A node is cut off or frozen while episodes are played, within a step, within a publish, and killed within the last two.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.aim import Aim, nothing_was_handed_in_late, send
from tests.cluster.hosts import Host, ip
from tests.cluster.kit import PATIENCE, Cluster, ledger
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
STRIKES = [(moment, fault) for fault in ("cut", "freeze") for moment in ("rollouts", "step", "publish")]
STRIKES += [("step", "kill"), ("publish", "kill")]  # while episodes are played, a node's actors alone are killed
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
    "monitor.engine_restarts=1000", "train.collective_timeout=60",
)  # fmt: skip


def join_ray(cluster: Cluster, host: Host) -> subprocess.Popen[str]:
    """A node of Ray's starts on the host; only those that are lent get work."""
    head = host is cluster.conductor
    role = ("--head", "--port=6379", "--include-dashboard=false") if head else ("--address=10.77.0.1:6379",)
    argv = [str(Path(sys.executable).with_name("ray")), "start", *role, f"--node-ip-address={host.address}"]
    argv += ["--num-cpus=4", "--object-store-memory=80000000", "--disable-usage-stats"]
    argv += [] if head else ['--resources={"lent": 8}']
    return subprocess.Popen(
        ["ip", "netns", "exec", host.name, *argv],
        env={**os.environ, **CHECKS},
        cwd=cluster.place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def joined(*nodes: subprocess.Popen[str]) -> None:
    """Wait until they run."""
    for node in nodes:
        told, _ = node.communicate(timeout=PATIENCE)
        assert node.returncode == 0, told


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
@pytest.mark.timeout(1500)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'agentrl[ray]'")
def test_what_ray_loses_costs_nothing_but_time(cluster: Cluster) -> None:
    for host in (cluster.conductor, cluster.a, cluster.b):
        joined(join_ray(cluster, host))  # one after the other: they share a folder of this machine
    config = cluster.place / "run.toml"
    config.write_text(config.read_text() + RAY)
    env = {**CHECKS, "PYTHONPATH": str(Path(__file__).parents[2])}
    conductor = cluster.conductor.start("conductor", "train", "run.toml", *SETTINGS, cwd=cluster.place, env=env)
    aim = Aim(cluster, conductor)
    cluster.until(lambda: cluster.steps() >= 2, conductor)
    assert lines(cluster.run, "step")[0]["behaviour/abs_log_weight_max"] < 1e-3
    assert bearers(cluster.a)
    assert bearers(cluster.b)
    lost = aim.lost(cluster.a)
    send(bearers(cluster.a), signal.SIGKILL)
    goes_on(aim, cluster.a, lost, cluster.steps())
    coming: list[subprocess.Popen[str]] = []
    for moment, fault in STRIKES:
        host = strike(aim, moment, fault, coming)
        if (moment, fault) != STRIKES[-1]:
            coming = [join_ray(cluster, host)]
    conductor.send_signal(signal.SIGINT)
    conductor.wait(PATIENCE)
    assert ledger(cluster.run)["incarnations"] >= 1 + len(STRIKES)
    nothing_was_handed_in_late(cluster.run)


def strike(aim: Aim, moment: str, fault: str, coming: list[subprocess.Popen[str]]) -> Host:
    """Lose the node that trains, have the run go on at the other, which may still be `coming`; the one that was lost.

    Nothing runs there any more, and its cable is back.
    """
    cluster, target = aim.cluster, aim.trains()
    host, began, lost = target.host, len(lines(cluster.run, "begin")), aim.lost(target.host)
    late = aim.strike(target, moment, fault)
    joined(*coming)
    cluster.until(lambda: aim.lost(host) > lost, aim.conductor)
    cluster.until(partial(aim.stepped_since, began + 1), aim.conductor)
    if fault == "freeze":
        aim.comes_back_late(target, late)
        host.thaw()
        # Ray has given the node up, and what ran there ends by itself.
        cluster.until(lambda: not bearers(host), aim.conductor)
    cluster.until(lambda: not aim.ranks(host), aim.conductor)  # also where the cable is not put back yet
    host.kill()
    host.mend()
    return host


def goes_on(aim: Aim, host: Host, lost: int, steps: int) -> None:
    aim.cluster.until(lambda: aim.lost(host) > lost, aim.conductor)
    aim.cluster.until(lambda: aim.cluster.steps() >= steps + 2, aim.conductor)
