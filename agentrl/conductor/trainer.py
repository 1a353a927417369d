"""The trainer's process group: started by torchrun, alive by heartbeats, dead with a reason."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from agentrl.child import RANK_LOGS_VARIABLE, Child, gpu_environment
from agentrl.conductor.cause import Death, codes_by_rank, death, group_death, read_lines, read_rank
from agentrl.conductor.feed import Phase
from agentrl.conductor.folder import write_atomically
from agentrl.conductor.watchdog import Standstill, Wait
from agentrl.train.options import TrainerJob

START_SECONDS = 300.0
"""Until the first heartbeat of every rank, counted from when its process is started."""
STILL_SECONDS = 30.0
"""So long may all ranks of a group stand still while they load; one that reads or computes keeps the others waiting."""


class Heartbeat(NamedTuple):
    """The last thing a rank said, and when (`time.monotonic()`)."""

    phase: str
    step: int
    since: float
    heard: float
    still: float = 0.0
    where: str = ""


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

    def __init__(self, ranks: int, silent_seconds: float, still_seconds: float = STILL_SECONDS) -> None:
        self.last: dict[int, Heartbeat] = {}
        self._ranks, self._silent_seconds, self._still_seconds = ranks, silent_seconds, still_seconds
        self._started = time.monotonic()
        self._standstill = Standstill()

    def start(self) -> None:
        """The ranks begin now."""
        self._started = time.monotonic()
        self._standstill = Standstill()

    def heard(self, phase: Phase) -> None:
        """A heartbeat came in."""
        now = time.monotonic()
        last = self.last.get(phase.rank)
        same = last is not None and (last.phase, last.step) == (phase.phase, phase.step)
        since = last.since if last is not None and same else now
        self.last[phase.rank] = Heartbeat(phase.phase, phase.step, since, now, phase.still, phase.where)

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        now = time.monotonic()
        if not self.last:
            return [Wait("the conductor", "the trainer's first heartbeat (it loads)", now - self._started)]
        return [
            Wait(f"trainer rank {rank}", f"{b.phase!r} of step {b.step} to end", now - b.since)
            for rank, b in sorted(self.last.items())
        ]

    def hangs(self, start_seconds: float = START_SECONDS) -> str | None:
        """Which rank says nothing, and where it was last; or that all stand still. None while the group gets on.

        To be asked again and again: what the conductor itself did not live through is not counted.
        """
        now = time.monotonic()
        if stood := self._standstill.seconds(0.0):
            self._started += stood
            self.last = {rank: beat._replace(heard=min(beat.heard + stood, now)) for rank, beat in self.last.items()}
        if now - self._started > start_seconds and (missing := sorted(set(range(self._ranks)) - set(self.last))):
            who = "the trainer" if len(missing) == self._ranks else f"trainer rank {missing[0]} of {self._ranks}"
            return f"{who} gave no sign of life within {start_seconds:.0f} s of its start"
        for rank, beat in self.last.items():
            if now - beat.heard > self._silent_seconds:
                silent = f"{self._silent_seconds:.0f} s in {beat.phase!r} of step {beat.step}"
                return f"trainer rank {rank} has been silent for {silent}"
        return self._all_stand()

    def _all_stand(self) -> str | None:
        """Whether no rank can ever get through its load: each waits for another one.

        Only then: in other phases ranks wait for the conductor. One rank's load is its own affair.
        """
        beats = sorted(self.last.items())
        if self._ranks == 1 or len(beats) < self._ranks or any(beat.phase != "load" for _, beat in beats):
            return None
        still = min(beat.still for _, beat in beats)
        if still < self._still_seconds:
            return None
        places = "; ".join(f"rank {rank} in {beat.where}" for rank, beat in beats[:4])
        return (
            f"all {self._ranks} trainer ranks have stood still in 'load' for {still:.0f} s, reading and computing "
            f"nothing: each waits for another ({places}{'; …' if len(beats) > 4 else ''})"
        )


class TrainerGroup:
    """One start of the trainer on this machine: `ranks` processes under torchrun."""

    def __init__(
        self,
        job: TrainerJob,
        path: Path,
        log: Path,
        token: str,
        *,
        silent_seconds: float = 90.0,
        still_seconds: float = STILL_SECONDS,
    ) -> None:
        """Ranks beat every 5 s, also within a long step; one that is silent for `silent_seconds` hangs."""
        write_atomically(path, job.model_dump_json(indent=1, exclude_unset=True))
        self.job = job
        ranks = job.train.ranks
        self._beats = Heartbeats(ranks, silent_seconds, still_seconds)
        # Under torchrun `log` is torchrun's own, and each rank has one beside it.
        logs = [rank_log(log.parent, rank) for rank in range(ranks if ranks > 1 else 0)]
        self._rank_logs = [(path, path.stat().st_size if path.exists() else 0) for path in logs]
        # One rank makes a group of itself: without torchrun it starts seconds sooner and its exit code is its own.
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        environment = {"AGENTRL_TOKEN": token, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {RANK_LOGS_VARIABLE: str(log.parent)} if ranks > 1 else {}
        environment |= gpu_environment(job.train.gpus)
        if not has_gpu():
            threads = str(job.train.threads)
            environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
            # Threads that wait must not spin: the engines want the cores.
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
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
        """Wait for the end: None for a clean one. A rank that hangs is killed with its group."""
        while (code := self.child.poll()) is None:
            if hangs := self._beats.hangs():
                self.child.kill()
                return Death(await self.child.wait(), f"{hangs}; the group was killed", own=False)
            await asyncio.sleep(0.1)
        return None if code == 0 else self._death(code)

    def _death(self, code: int) -> Death:
        codes = codes_by_rank(read_lines(self.child.log, self.child.log_start))
        ends = [read_rank(rank, log, at, codes.get(rank)) for rank, (log, at) in enumerate(self._rank_logs)]
        # The guard reports a signal as 128 + its number.
        return group_death(self.child.name, code, ends) or Death(code, death(self.child, code), own=code < 128)


def rank_log(logs: Path, rank: int) -> Path:
    """The log of one rank of several."""
    return logs / f"trainer-{rank}.log"


def has_gpu() -> bool:
    """Whether a CUDA device is there, asked without torch."""
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()
