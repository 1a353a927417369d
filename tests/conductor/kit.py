"""A tiny run on real parts, started as a user starts it, and what may be done to its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.monitor.metrics import read_metrics
from agentrl.testing.tiny import make_tiny_model

PATIENCE = 300.0
"""For anything to come about; a shared machine may be many times slower than a quiet one."""
ENV = '''
import asyncio, json, os, time
from agentrl.env import Env
from agentrl.types import Step

class Bright(Env):
    """Two turns; what counts is how many of the answer's characters come early in the alphabet.

    Episodes of training beyond the first `gate` of a process (one is begun to see that it can be) wait until the test
    has made a file `go`. With `linger` one episode at a time, and of each group at most one, waits between its turns
    for a publish, so that it is sampled by several versions.
    """
    begun, lingers, lingered = 0, False, set()
    def __init__(self, row, *, fault="", gate=None, linger=False):
        super().__init__(row)
        self.fault, self.turn, self.gate, self.linger = fault, 0, gate, linger
        self.train = str(row.get("word")).startswith("train")
    @classmethod
    def rows(cls, split, seed):
        return ({"word": f"{split} {i}"} for i in range(40))
    async def reset(self, *, seed=None, options=None):
        Bright.begun += self.train
        while self.train and self.gate is not None and Bright.begun > self.gate and not os.path.exists("go"):
            await asyncio.sleep(0.05)
        return [{"role": "user", "content": self.row["word"]}], {}
    async def step(self, action):
        if self.fault == "step":
            raise RuntimeError("the simulator broke")
        self.turn += 1
        lingers = self.linger and self.train and self.turn == 1 and not Bright.lingers
        if lingers and self.row["word"] not in Bright.lingered:
            Bright.lingers = True
            Bright.lingered.add(self.row["word"])
            try:
                await published()
            finally:
                Bright.lingers = False
        text = action["content"] or ""
        reward = sum(c < "m" for c in text) / max(len(text), 1)
        if self.fault:
            reward = {"nan": float("nan"), "text": "good"}[self.fault]
        return Step([{"role": "user", "content": "again"}], reward, self.turn == 2, False, {})

'''
PUBLISHED = '''
async def published():
    """Wait until the engines have other weights than now, while there are still some to come.

    Not for ever: where the trainer needs this very group to go on, there will be none.
    """
    def count():
        with open("runs/r/metrics.jsonl", "rb") as file:
            return sum(json.loads(line)["kind"] == "publish" for line in file if line.endswith(b"\\n"))
    before, end = count(), time.monotonic() + 20
    while before < 5 and count() == before and time.monotonic() < end:
        await asyncio.sleep(0.05)
'''
RUN = """
name = "r"
model = "model"
[env]
path = "env.py:Bright"
[rollout]
groups_per_step = 2
samples = 2
max_tokens = 24
filter_equal = false
max_failed = 2
[eval]
every = 2
rows = 3
[train]
steps = 3
lr = 1e-3
checkpoint_every = 2
[monitor]
page = false
"""


def make_place(folder: Path, *, layers: int = 1, hidden: int = 32, intermediate: int = 32) -> Path:
    """A folder with a model, an environment and a config."""
    make_tiny_model(folder / "model", layers=layers, hidden=hidden, intermediate=intermediate, max_length=256)
    (folder / "env.py").write_text(ENV + PUBLISHED)
    (folder / "run.toml").write_text(RUN)
    return folder


def start(place: Path, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "agentrl.cli", *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str], seconds: float = PATIENCE) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.05)


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == kind]


def children_of(place: Path) -> list[str]:
    """Command lines of live processes that belong to runs in `place`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(place) in command and "agentrl.train" in command:
                found.append(command)
    return found


def wait_for_none(place: Path) -> None:
    """The guards end the children of a conductor that was killed."""
    end = time.monotonic() + 60
    while left := children_of(place):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def kill_child(conductor: int, command: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal the last process below the conductor that runs `command`: a trainer's rank, not torchrun or a guard."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue

    def descends(pid: int) -> bool:
        while pid in parents and pid != conductor:
            pid = parents[pid]
        return pid == conductor

    launchers = ("agentrl.child", "torch.distributed.run")
    found = [
        pid
        for pid in parents
        if command in commands[pid] and descends(pid) and not any(name in commands[pid] for name in launchers)
    ]
    os.kill(max(found), number)
