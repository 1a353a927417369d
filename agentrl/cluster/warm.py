"""Ranks that have loaded their libraries before they are wanted, so that a lost host costs seconds less."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from agentrl.child import Child
from agentrl.conductor.trainer import has_gpu
from agentrl.train.warm import Order


class WarmRanks:
    """As many as this host has slots, while it has no ranks that run. About 400 MB of memory each."""

    def __init__(self, slots: int, scratch: Path) -> None:
        self._slots, self._folder = slots, scratch / "warm"
        self._waiting: list[_Waiting] = []
        self._begun: list[_Waiting] = []
        """Their pipes stay open: what is in one that nobody has open is lost."""
        self._number = 0

    def fill(self) -> None:
        """Have all of them load."""
        self._waiting, self._begun = _alive(self._waiting), _alive(self._begun)
        while len(self._waiting) < self._slots:
            self._number += 1
            self._waiting.append(_Waiting(self._folder / str(self._number)))

    def start(self, name: str, job: Path, env: Mapping[str, str], log: Path) -> Child:
        """A rank, warm where there is one."""
        while self._waiting:
            rank = self._waiting.pop(0)
            if rank.child.poll() is None:
                self._begun.append(rank)
                return rank.begin(name, job, env, log)
            rank.close()
        argv = [sys.executable, "-m", "agentrl.train", str(job)]
        return Child(name, argv, log=log, env={**_base(), **env})

    async def close(self) -> None:
        """End those that wait."""
        waiting, begun, self._waiting, self._begun = self._waiting, self._begun, [], []
        for rank in waiting:
            rank.child.kill()
        for rank in waiting:
            await rank.child.wait()
        for rank in (*waiting, *begun):
            rank.close()


class _Waiting:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        pipe = folder / "order"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        # Open for both: neither this end nor the other one ever waits for the other to come.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        argv = [sys.executable, "-m", "agentrl.train.warm", str(pipe)]
        self.child = Child("a trainer rank that waits", argv, log=folder / "log", env=_base())

    def begin(self, name: str, job: Path, env: Mapping[str, str], log: Path) -> Child:
        child = self.child
        log.parent.mkdir(parents=True, exist_ok=True)
        child.name, child.log = name, log
        child.log_start = log.stat().st_size if log.exists() else 0
        order = Order(job=str(job), env=dict(env), log=str(log))
        os.write(self._pipe, order.model_dump_json().encode() + b"\n")
        return child

    def close(self) -> None:
        os.close(self._pipe)


def _alive(ranks: list[_Waiting]) -> list[_Waiting]:
    """Those that have not ended; the others' pipes are closed."""
    alive = []
    for rank in ranks:
        if rank.child.poll() is None:
            alive.append(rank)
        else:
            rank.close()
    return alive


def _base() -> dict[str, str]:
    always = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return always if has_gpu() else {**always, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
