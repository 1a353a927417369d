"""Kills random processes of a run every few seconds, and then asks the ledger whether anything was lost.

    python examples/chaos.py --kills 60          # about a quarter of an hour
    python examples/chaos.py --kills 6 --every 1 # each kind once

A tiny model trains on a small task on the CPU. SIGKILL and SIGSTOP fall on the conductor, a trainer rank and the
engine; a killed conductor is started again with `--resume`. Then the run goes to its end, `examples/ledger.py` checks
its books and `examples/replay.py` trains its pool again. The last line is JSON; the exit code is 1 where anything is
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.env import Env
from agentrl.monitor.metrics import read_metrics
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Info, Message, Row, Step

HERE = Path(__file__).resolve().parent
ORPHAN_SECONDS = 60.0
STALL_SECONDS = 400.0
KINDS = tuple((name, number) for number in ("SIGKILL", "SIGSTOP") for name in ("conductor", "trainer", "engine"))
CONFIG = """
name = "chaos"
[env]
path = "{here}/chaos.py:Letters"
[rollout]
groups_per_step = 4
samples = 4
staleness = 2
max_tokens = 24
when_stale = "{policy}"
[eval]
every = 0
[train]
steps = 1000000
lr = 1e-3
checkpoint_every = 2
keep_checkpoints = 1000000
[monitor]
trainer_restarts = 1000
engine_restarts = 1000
silent_seconds = {silent}
"""


class Letters(Env):
    """Two turns; what counts is how many of the answer's characters come early in the alphabet."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.turn = 0

    @classmethod
    def rows(cls, split: str, seed: int) -> list[Row]:
        """A thousand of them."""
        return [{"word": f"{split} {i}"} for i in range(1000)]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The row's word."""
        return [{"role": "user", "content": self.row["word"]}], {}

    async def step(self, action: Message) -> Step:
        """Count its letters."""
        self.turn += 1
        text = action["content"] or ""
        reward = sum(c < "m" for c in text) / max(len(text), 1)
        return Step([{"role": "user", "content": "again"}], reward, self.turn == 2, False, {})


class Process(NamedTuple):
    """A line of /proc."""

    parent: int
    command: str


def processes() -> dict[int, Process]:
    """All of this machine that can be read."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found[int(entry.name)] = Process(parent, command)
    return found


def below(ancestor: int, module: str) -> list[int]:
    """Processes below `ancestor` that run `module`, guards and launchers left out."""
    table = processes()

    def descends(pid: int) -> bool:
        while pid in table and pid != ancestor:
            pid = table[pid].parent
        return pid == ancestor

    launchers = ("agentrl.child", "torch.distributed.run")
    return [
        pid
        for pid, process in table.items()
        if module in process.command and not any(name in process.command for name in launchers) and descends(pid)
    ]


class Chaos:
    """One run and what was done to it."""

    def __init__(self, folder: Path, seed: int, overrides: list[str]) -> None:
        self.folder, self.overrides = folder, overrides
        self.run = folder / "runs" / "chaos"
        self.dice = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.starts = self.ends = self.orphans = 0
        self.conductor = self.start()

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """The conductor, or its continuation."""
        resume = ["--resume"] if (self.run / "config.toml").exists() else []
        command = [sys.executable, "-m", "agentrl.cli", "train", "run.toml", *resume, *self.overrides, *more]
        self.starts += 1
        with (self.folder / "conductor.out").open("ab") as out:
            return subprocess.Popen(
                command, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def steps(self) -> int:
        """Steps done, over all incarnations, abandoned ones included."""
        return sum(line["kind"] == "step" for line in read_metrics(self.run / "metrics.jsonl"))

    def wait(self, what: str, done: Callable[[], bool], seconds: float = STALL_SECONDS) -> None:
        """Until it is so; a run that ends in between is resumed, a stall is the end."""
        until = time.monotonic() + seconds
        while not done():
            if self.conductor.poll() is not None:
                self.ends += 1  # it gave up with an error: allowed, as long as a resume goes on
                self.resume()
            if time.monotonic() > until:
                tail = (self.folder / "conductor.out").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the run stalls: {what} did not come within {seconds:.0f} s\n{tail}")
            time.sleep(0.05)

    def resume(self) -> None:
        """After the conductor's end: its children must go by themselves, then start it again."""
        until = time.monotonic() + ORPHAN_SECONDS
        while left := [p for p in processes().values() if str(self.run) in p.command]:
            if time.monotonic() > until:
                self.orphans += len(left)
                break
            time.sleep(0.05)
        self.conductor = self.start()

    def strike(self, name: str, number: str) -> bool:
        """Hit one process; False where there is none."""
        if name == "conductor":
            pids = [self.conductor.pid]
        else:
            module = {"trainer": "agentrl.train", "engine": "agentrl.engine.embedded"}[name]
            pids = below(self.conductor.pid, module)
        if not pids or self.conductor.poll() is not None:
            return False
        pid = self.dice.choice(pids)
        try:
            os.kill(pid, signal.Signals[number])
        except ProcessLookupError:
            return False
        self.kills[f"{name} {number}"] += 1
        print(f"{time.strftime('%X')} {number} to the {name}, {self.steps()} steps so far", flush=True)
        if name == "conductor":
            if number == "SIGSTOP":
                time.sleep(self.dice.uniform(0.5, 3.0))
                os.kill(pid, signal.SIGCONT)
            else:
                self.conductor.wait()
                self.resume()
        return True

    def pause(self, every: float) -> None:
        """Mostly until the run has done something again; now and then hit it while it starts."""
        if self.dice.random() < 0.3:
            time.sleep(self.dice.uniform(0.0, every))
            return
        before = self.steps()
        self.wait("a step", lambda: self.steps() > before)
        time.sleep(self.dice.uniform(0.0, every))

    def finish(self, more: int) -> None:
        """Let it go a few steps further and end by itself."""
        before = self.steps()
        self.wait("a step", lambda: self.steps() > before)
        self.conductor.send_signal(signal.SIGINT)
        self.conductor.wait(120)
        last = max(line["step"] for line in read_metrics(self.run / "metrics.jsonl") if line["kind"] == "step")
        self.overrides.append(f"train.steps={last + more}")
        self.conductor = self.start()
        until = time.monotonic() + STALL_SECONDS
        while (code := self.conductor.poll()) is None and time.monotonic() < until:
            time.sleep(0.1)
        if code != 0:
            raise RuntimeError(f"the last part ended with {code}: see {self.folder / 'conductor.out'}")


def cause_chaos(folder: Path, options: argparse.Namespace) -> Chaos:
    """The whole story, up to the run's own end."""
    make_tiny_model(folder / "model", layers=1, hidden=32, intermediate=32, max_length=256)
    text = CONFIG.format(here=HERE, policy=options.when_stale, silent=options.silent_seconds)
    (folder / "run.toml").write_text(f"model = {str(folder / 'model')!r}\n{text}")
    chaos = Chaos(folder, options.seed, list(options.overrides))
    try:
        chaos.wait("the first checkpoint", lambda: any((chaos.run / "checkpoints").glob("step-*")))
        while sum(chaos.kills.values()) < options.kills:
            done = sum(chaos.kills.values())
            # Each kind once, then by chance.
            kind = KINDS[done] if done < len(KINDS) else chaos.dice.choice(KINDS)
            chaos.strike(*kind)
            chaos.pause(options.every)
        chaos.finish(3)
    finally:
        chaos.conductor.kill()
        chaos.conductor.wait()
    return chaos


def _json_of(script: str, run: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(HERE / script), str(run)], stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        raise RuntimeError(f"{script} ended with {done.returncode} and said nothing")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    """Cause it, then judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--every", type=float, default=5.0, help="seconds, at most, after the run goes on again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--when-stale", choices=("wait", "drop"), default="wait")
    parser.add_argument("--silent-seconds", type=float, default=15.0, help="after which a stopped process is ended")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the run (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", help="settings of the run, KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        chaos = cause_chaos(folder.resolve(), options)
        verdict = _json_of("ledger.py", chaos.run)
        again = _json_of("replay.py", chaos.run)
    good = verdict["ok"] and not chaos.orphans and again["replayed_steps"] and not again["replay_differing"]
    story = {
        "ok": bool(good),
        "kills": sum(chaos.kills.values()),
        "kills_by_kind": dict(chaos.kills),
        "conductor_starts": chaos.starts,
        "ends_with_error": chaos.ends,
        "orphans": chaos.orphans,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps({**verdict, **again, **story}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
