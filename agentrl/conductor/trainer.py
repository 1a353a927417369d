"""The trainer's process group: started by torchrun, alive by heartbeats, dead with a reason."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from agentrl.child import Child, gpu_environment
from agentrl.conductor.feed import Phase
from agentrl.conductor.folder import write_atomically
from agentrl.conductor.watchdog import Wait
from agentrl.train.options import TrainerJob

START_SECONDS = 300.0
"""Until the first heartbeat: torch, DeepSpeed and the model are loaded before it."""


class Heartbeat(NamedTuple):
    """The last thing a rank said, and when (`time.monotonic()`)."""

    phase: str
    step: int
    since: float
    heard: float


class Death(NamedTuple):
    """How a child ended. `text` names it, its exit code, the first error and the end of its log.

    `own` is false where it was killed from outside: that says nothing of whether it will happen again.
    """

    code: int
    text: str
    own: bool = True


class Group(Protocol):
    """One start of the trainer, wherever its ranks run."""

    @property
    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of each rank."""
        ...

    def heard(self, phase: Phase) -> None:
        """A heartbeat came in."""
        ...

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        ...

    async def ended(self) -> Death | None:
        """Wait for the end: None for a clean one. A silent rank ends its group."""
        ...

    async def stop(self) -> None:
        """End what runs of it."""
        ...


class Heartbeats:
    """What the ranks of a group said last."""

    def __init__(self) -> None:
        self.last: dict[int, Heartbeat] = {}
        self._started = time.monotonic()

    def start(self) -> None:
        """The ranks begin now."""
        self._started = time.monotonic()

    def heard(self, phase: Phase) -> None:
        """A heartbeat came in."""
        now = time.monotonic()
        last = self.last.get(phase.rank)
        same = last is not None and (last.phase, last.step) == (phase.phase, phase.step)
        since = last.since if last is not None and same else now
        self.last[phase.rank] = Heartbeat(phase.phase, phase.step, since, now)

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        now = time.monotonic()
        if not self.last:
            return [Wait("the conductor", "the trainer's first heartbeat (it loads)", now - self._started)]
        return [
            Wait(f"trainer rank {rank}", f"{b.phase!r} of step {b.step} to end", now - b.since)
            for rank, b in sorted(self.last.items())
        ]

    def silent(self, seconds: float, start_seconds: float) -> str | None:
        """Which rank is silent, and where."""
        now = time.monotonic()
        if not self.last and now - self._started > start_seconds:
            return f"the trainer gave no sign of life within {start_seconds:.0f} s of its start"
        for rank, beat in self.last.items():
            if now - beat.heard > seconds:
                return f"trainer rank {rank} has been silent for {seconds:.0f} s in {beat.phase!r} of step {beat.step}"
        return None


class TrainerGroup:
    """One start of the trainer on this machine: `ranks` processes under torchrun."""

    def __init__(self, job: TrainerJob, path: Path, log: Path, token: str, *, silent_seconds: float = 90.0) -> None:
        """Ranks beat every 5 s, also within a long step; one that is silent for `silent_seconds` hangs."""
        write_atomically(path, job.model_dump_json(indent=1, exclude_unset=True))
        self.job = job
        self._silent_seconds = silent_seconds
        self._log_start = log.stat().st_size if log.exists() else 0
        self._beats = Heartbeats()
        ranks = job.train.ranks
        # One rank makes a group of itself: without torchrun it starts seconds sooner and its exit code is its own.
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        environment = {"AGENTRL_TOKEN": token, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= gpu_environment(job.train.gpus)
        if not has_gpu():
            environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.child = Child(
            "the trainer", [sys.executable, *torchrun, "-m", "agentrl.train", str(path)], log=log, env=environment
        )

    def heard(self, phase: Phase) -> None:
        """A heartbeat came in."""
        self._beats.heard(phase)

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        return self._beats.waits()

    @property
    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of each rank."""
        return dict(self._beats.last)

    async def stop(self) -> None:
        """End it."""
        await self.child.stop()

    async def ended(self) -> Death | None:
        """Wait for the end: None for a clean one. A silent rank is killed with its group."""
        while (code := self.child.poll()) is None:
            if silent := self._beats.silent(self._silent_seconds, START_SECONDS):
                self.child.kill()
                return Death(await self.child.wait(), f"{silent}; the group was killed", own=False)
            await asyncio.sleep(0.1)
        # The guard reports a signal as 128 + its number.
        return None if code == 0 else Death(code, death(self.child, code, self._log_start), own=code < 128)


def death(child: Child, code: int, log_start: int = 0) -> str:
    """How `child` ended: name, code, first error and last lines of its log (from `log_start` on)."""
    with child.log.open("rb") as file:
        file.seek(log_start)
        lines = file.read().decode(errors="replace").splitlines()
    number = -code if code < 0 else code - 128 if code > 128 else 0
    how = f"was killed by {_signal_name(number)}" if number else f"ended with exit code {code}"
    first = first_error(lines)
    tail = "\n".join(f"  | {line}" for line in lines[-12:])
    return f"{child.name} {how}{f': {first}' if first else ''}\nthe end of {child.log}:\n{tail}"


_ERROR = re.compile(r"^(?:\[(?:rank)?\d+\]:?\s*)?((?:[\w.]+\.)?\w*(?:Error|Exception|Exceeded|Lost|Refused)\b:? ?.*)$")


def first_error(lines: Sequence[str]) -> str | None:
    """The first exception of a log, the last of its chain: later tracebacks are mostly its consequences."""
    found = None
    for number, line in enumerate(lines):
        if match := _ERROR.match(line.strip()):
            found = match[1]
            if not any(_CHAINED.search(text) for text in lines[number + 1 : number + 6]):
                return found
    return found


_CHAINED = re.compile(r"direct cause of the following exception|During handling of the above exception")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def has_gpu() -> bool:
    """Whether a CUDA device is there, asked without torch."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()
