"""A strike is aimed: the host that trains is stopped at the moment looked for, which is then checked."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.monitor.metrics import read_metrics
from tests.cluster.hosts import Host, ip
from tests.cluster.kit import PATIENCE, Cluster
from tests.conductor.kit import lines

RANK = "rank-0.log"
"""The rank that writes the weights and asks for batches."""


class Target(NamedTuple):
    """Where rank 0 runs."""

    host: Host
    scratch: Path
    """Its worker's folder."""


class Aim:
    """Finds the host that trains, and the moment, whoever started the workers."""

    def __init__(self, cluster: Cluster, conductor: subprocess.Popen[bytes]) -> None:
        self.cluster, self.conductor = cluster, conductor

    def ranks(self, host: Host) -> dict[int, Path]:
        """The processes that train there, with their logs; not the guards that started them."""
        found = {}
        for pid in map(int, ip("netns", "pids", host.name).split()):
            try:
                log = Path(os.readlink(f"/proc/{pid}/fd/1"))
            except OSError:
                continue
            if log.name.startswith("rank-") and "agentrl.child" not in read(f"/proc/{pid}/cmdline"):
                found[pid] = log
        return found

    def trains(self) -> Target:
        """Waits until there is one rank 0, and a step is made."""
        found: list[Target] = []

        def looked() -> bool:
            leads = {
                (host, log.parents[1])
                for host in (self.cluster.a, self.cluster.b)
                for log in self.ranks(host).values()
                if log.name == RANK
            }
            found[:] = [Target(*lead) for lead in leads]
            return len(found) == 1 and self.cluster.steps() > 0

        self.cluster.until(looked, self.conductor)
        return found[0]

    def hold(self, target: Target, moment: str) -> None:
        """Stop the host within `moment`; what is stopped too early or too late goes on, and it is aimed again."""
        end = time.monotonic() + PATIENCE
        while True:
            pids = [int(pid) for pid in ip("netns", "pids", target.host.name).split()]
            before = self._seen(target, moment)
            while self._seen(target, moment) <= before:
                assert self.conductor.poll() is None, self.cluster.output()
                assert time.monotonic() < end, f"no {moment} was hit\n{self.cluster.output()}"
                time.sleep(0.002)
            send(pids, signal.SIGSTOP)
            time.sleep(0.3)  # what was on its way to the conductor has arrived
            if self._within(target, moment):
                return
            send(pids, signal.SIGCONT)

    def strike(self, target: Target, moment: str, fault: str) -> dict[int, Path]:
        """Lose the host by `fault` within `moment`: killed, cut off, or left frozen. The ranks that ran there."""
        host = target.host
        self.hold(target, moment)
        print(f"{time.monotonic():.1f} {host.short} {fault} within {moment}", flush=True)
        late = self.ranks(host)
        if fault == "kill":
            host.kill()
        elif fault == "cut":
            host.cut()
            host.thaw()
        return late

    def comes_back_late(self, target: Target, ranks: Iterable[int]) -> None:
        """The ranks alone go on, with nobody there who would end them: the conductor takes nothing from them."""
        log = target.scratch / "logs" / RANK
        refused = read(log).count("is over, now")
        send(ranks, signal.SIGCONT)
        self.cluster.until(lambda: read(log).count("is over, now") > refused, self.conductor)

    def lost(self, host: Host) -> int:
        """How often a worker of the host was lost so far."""
        text = read(self.cluster.run / "logs" / "conductor.log")
        return sum(f"{host.address} is lost" in line for line in text.splitlines())

    def stepped_since(self, begins: int) -> bool:
        """Whether a step was made by an incarnation that is at least the so-many-th."""
        began = lines(self.cluster.run, "begin")
        if len(began) < begins:
            return False
        label = began[-1]["version"].partition(".")[0]
        return any(line["version"].partition(".")[0] == label for line in lines(self.cluster.run, "step"))

    def _seen(self, target: Target, moment: str) -> set[str]:
        """Grows when the moment begins."""
        if moment == "publish":
            return {str(path) for path in target.scratch.glob("trainer-*/weights/[0-9]*")}
        if moment == "save":
            return {str(path) for path in target.scratch.glob("trainer-*/checkpoints/.aside-*")}
        return set(map(str, range(len(lines(self.cluster.run, "take" if moment == "step" else "checkpoint")))))

    def _within(self, target: Target, moment: str) -> bool:
        run = self.cluster.run
        if moment == "rollouts":
            return True  # they never stop
        if moment == "step":
            return bool(_next(lines(run, "take")[-1]["version"]) != lines(run, "step")[-1]["version"])
        written = max((Path(path) for path in self._seen(target, moment)), key=_age, default=None)
        if written is None:
            return False
        if moment == "publish":
            return str(lines(run, "publish")[-1]["version"]) != written.name
        return not (run / "checkpoints" / f"step-{written.name.rpartition('-')[2]}").exists()


def nothing_was_handed_in_late(run: Path) -> None:
    """No line of an incarnation comes after the next one has begun."""
    incarnation = 0
    for line in _lines_of_all(run):
        label = int(str(line["version"]).partition(".")[0])
        if line["kind"] == "begin":
            assert label > incarnation, line
            incarnation = label
        else:
            assert label == incarnation, f"a line of incarnation {label} within {incarnation}: {line}"


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def read(path: str | Path) -> str:
    """What is in a file; nothing where there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _lines_of_all(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] in ("begin", "take", "step")]


def _age(path: Path) -> tuple[int, float]:
    generation = int(path.parent.parent.name.rpartition("-")[2])
    try:
        return generation, path.stat().st_mtime
    except OSError:  # renamed or removed meanwhile
        return generation, 0.0


def _next(version: str) -> str:
    incarnation, _, number = version.partition(".")
    return f"{incarnation}.{int(number) + 1}"
