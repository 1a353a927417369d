"""What may befall a host, at the worst moments: while episodes are played, within a step, a publish, a checkpoint.

A strike is aimed: the host that trains is stopped at the moment looked for, which is then checked, and only then
killed, cut off, or left frozen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.monitor.metrics import read_metrics
from tests.cluster.hosts import Host, ip
from tests.cluster.kit import PATIENCE, Cluster, ledger
from tests.conductor.kit import lines

ROLES = ("engine", "trainer")
STRIKES = [(moment, fault) for fault in ("cut", "freeze", "kill") for moment in ("rollouts", "step", "publish", "save")]
SETTINGS = (
    "train.ranks=1", "train.steps=100000", "train.checkpoint_every=1", "train.keep_checkpoints=9999",
    "eval.every=1000", "engine.count=2", "rollout.staleness=2",
)  # fmt: skip


class Aim:
    """Finds the host that trains, and the moment."""

    def __init__(self, cluster: Cluster, conductor: subprocess.Popen[bytes]) -> None:
        self.cluster, self.conductor = cluster, conductor

    def scratch(self, host: Host) -> Path:
        return self.cluster.place / "scratch" / f"{host.short}-trainer"

    def ranks(self, host: Host) -> list[int]:
        """The processes that train there: they write a rank's log, and are not the guard that started them."""
        found = []
        for pid in map(int, ip("netns", "pids", host.name).split()):
            try:
                log = Path(os.readlink(f"/proc/{pid}/fd/1")).name
            except OSError:
                continue
            if log.startswith("rank-") and "agentrl.child" not in _read(f"/proc/{pid}/cmdline"):
                found.append(pid)
        return found

    def trains(self) -> Host:
        found: list[Host] = []

        def looked() -> bool:
            found[:] = [host for host in (self.cluster.a, self.cluster.b) if self.ranks(host)]
            return len(found) == 1 and self.cluster.steps() > 0

        self.cluster.until(looked, self.conductor)
        return found[0]

    def hold(self, host: Host, moment: str) -> None:
        """Stop the host within `moment`; what is stopped too early or too late goes on, and it is aimed again."""
        end = time.monotonic() + PATIENCE
        while True:
            pids = [int(pid) for pid in ip("netns", "pids", host.name).split()]
            before = self._seen(host, moment)
            while self._seen(host, moment) <= before:
                assert self.conductor.poll() is None, self.cluster.output()
                assert time.monotonic() < end, f"no {moment} was hit\n{self.cluster.output()}"
                time.sleep(0.002)
            _signal(pids, signal.SIGSTOP)
            time.sleep(0.3)  # what was on its way to the conductor has arrived
            if self._within(host, moment):
                return
            _signal(pids, signal.SIGCONT)

    def _seen(self, host: Host, moment: str) -> set[str]:
        """Grows when the moment begins."""
        if moment == "publish":
            return {str(path) for path in self.scratch(host).glob("trainer-*/weights/[0-9]*")}
        if moment == "save":
            return {str(path) for path in self.scratch(host).glob("trainer-*/checkpoints/.aside-*")}
        return set(map(str, range(len(lines(self.cluster.run, "take" if moment == "step" else "checkpoint")))))

    def _within(self, host: Host, moment: str) -> bool:
        run = self.cluster.run
        if moment == "rollouts":
            return True  # they never stop
        if moment == "step":
            return bool(_next(lines(run, "take")[-1]["version"]) != lines(run, "step")[-1]["version"])
        written = max((Path(path) for path in self._seen(host, moment)), key=_age, default=None)
        if written is None:
            return False
        if moment == "publish":
            return str(lines(run, "publish")[-1]["version"]) != written.name
        return not (run / "checkpoints" / f"step-{written.name.rpartition('-')[2]}").exists()


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_a_host_lost_at_any_moment_costs_nothing_but_time(cluster: Cluster) -> None:
    conductor = cluster.train(*SETTINGS, lost=4.0)
    for host in (cluster.a, cluster.b):
        cluster.lend(host, *ROLES)
    aim = Aim(cluster, conductor)
    for moment, fault in STRIKES:
        host = aim.trains()
        began, lost = len(lines(cluster.run, "begin")), _lost(cluster, host)
        aim.hold(host, moment)
        print(f"{time.monotonic():.1f} {host.short} {fault} within {moment}", flush=True)
        late = aim.ranks(host)
        if fault == "kill":
            host.kill()
        elif fault == "cut":
            host.cut()
            host.thaw()
        cluster.until(partial(_is_lost, cluster, host, lost + len(ROLES)), conductor)
        cluster.until(partial(_stepped_since, cluster, began + 1), conductor)
        if fault == "freeze":
            _comes_back_late(aim, host, late)
            host.thaw()
        elif fault == "cut":
            host.mend()
        else:
            cluster.lend(host, *ROLES)
    conductor.send_signal(signal.SIGINT)
    conductor.wait(60)
    assert ledger(cluster.run)["incarnations"] >= 1 + len(STRIKES)
    _nothing_was_handed_in_late(cluster.run)


def _comes_back_late(aim: Aim, host: Host, ranks: list[int]) -> None:
    """The ranks alone go on, with nobody there who would end them: the conductor takes nothing from them."""
    log = aim.scratch(host) / "logs" / "rank-0.log"
    refused = _read(log).count("is over, now")
    _signal(ranks, signal.SIGCONT)
    aim.cluster.until(lambda: _read(log).count("is over, now") > refused, aim.conductor)


def _nothing_was_handed_in_late(run: Path) -> None:
    incarnation = 0
    for line in lines_of_all(run):
        label = int(str(line["version"]).partition(".")[0])
        if line["kind"] == "begin":
            assert label > incarnation, line
            incarnation = label
        else:
            assert label == incarnation, f"a line of incarnation {label} within {incarnation}: {line}"


def lines_of_all(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] in ("begin", "take", "step")]


def _age(path: Path) -> tuple[int, float]:
    generation = int(path.parent.parent.name.rpartition("-")[2])
    try:
        return generation, path.stat().st_mtime
    except OSError:  # renamed or removed meanwhile
        return generation, 0.0


def _is_lost(cluster: Cluster, host: Host, times: int) -> bool:
    return _lost(cluster, host) >= times


def _lost(cluster: Cluster, host: Host) -> int:
    text = _read(cluster.run / "logs" / "conductor.log")
    return sum(f"{host.address} is lost" in line for line in text.splitlines())


def _stepped_since(cluster: Cluster, begins: int) -> bool:
    """Whether a step was made by an incarnation that is at least the so-many-th."""
    began = lines(cluster.run, "begin")
    if len(began) < begins:
        return False
    label = began[-1]["version"].partition(".")[0]
    return any(line["version"].partition(".")[0] == label for line in lines(cluster.run, "step"))


def _next(version: str) -> str:
    incarnation, _, number = version.partition(".")
    return f"{incarnation}.{int(number) + 1}"


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
