"""A long run under observation: memory of each process and disk of the run's folder over hundreds of steps.

    python examples/benchmarks/soak.py --steps 300
    python examples/benchmarks/soak.py --steps 300 --scripted      # seconds: gate, pool and runner alone

A tiny model trains on the task of `examples/chaos.py`. After a quarter of the steps (the warm-up) memory must stay
where it is. The last line is JSON: for each process the median resident memory of the first and of the last third after
the warm-up and their ratio, and the largest size of the run's folder; `flat` says that every ratio is within 5 %.
With `--scripted` the scripted engine answers in virtual time and a trainer takes, publishes and forgets as a real one
would; only the process that does so is observed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.monitor.metrics import read_metrics
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.pool import Pool
from agentrl.rollout.runner import Runner
from agentrl.testing.clock import run_virtual
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.session import byte_sessions
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Message, Step, Version

EXAMPLES = Path(__file__).resolve().parents[1]
CONFIG = """
name = "soak"
model = "model"
[env]
path = "{examples}/chaos.py:Letters"
[rollout]
groups_per_step = 4
samples = 4
staleness = 2
max_tokens = 24
[eval]
every = 50
rows = 16
[train]
steps = {steps}
lr = 1e-4
checkpoint_every = 10
"""


def memory_mib(conductor: int) -> dict[str, float]:
    """Resident memory of the conductor, the trainer and the engine; those that are not there are left out."""
    found = {"conductor": psutil.Process(conductor).memory_info().rss / 2**20}
    for process in psutil.Process(conductor).children(recursive=True):
        try:
            command, size = " ".join(process.cmdline()), process.memory_info().rss / 2**20
        except psutil.Error:
            continue
        for name in ("train", "engine"):
            if f"agentrl.{name}" in command and "agentrl.child" not in command:
                found[name] = max(size, found.get(name, 0.0))
    return found


def disk_mib(folder: Path) -> float:
    """Size of all files; those that go away in between count for nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total / 2**20


def observe(folder: Path, steps: int) -> dict[str, Any]:
    """Run it to its end."""
    make_tiny_model(folder / "model", layers=1, hidden=32, intermediate=32, max_length=256)
    (folder / "run.toml").write_text(CONFIG.format(examples=EXAMPLES, steps=steps))
    run = folder / "runs" / "soak"
    seen: dict[str, list[tuple[int, float]]] = defaultdict(list)
    disk: list[tuple[int, float]] = []
    with (folder / "out").open("wb") as out:
        conductor = subprocess.Popen(
            [sys.executable, "-m", "agentrl.cli", "train", "run.toml"], cwd=folder, stdout=out, stderr=out
        )
        while conductor.poll() is None:
            time.sleep(1.0)
            done = sum(line["kind"] == "step" for line in read_metrics(run / "metrics.jsonl"))
            for name, size in memory_mib(conductor.pid).items():
                seen[name].append((done, size))
            disk.append((done, disk_mib(run)))
    if conductor.returncode:
        raise RuntimeError(f"the run ended with {conductor.returncode}:\n{(folder / 'out').read_text()[-3000:]}")
    return report(seen, disk, steps)


def report(seen: dict[str, list[tuple[int, float]]], disk: list[tuple[int, float]], steps: int) -> dict[str, Any]:
    """Medians after the warm-up."""
    result: dict[str, Any] = {"steps": steps}
    flat = True
    for name, samples in seen.items():
        begin, end = steps // 4, steps
        first = statistics.median(size for done, size in samples if begin <= done < begin + (end - begin) // 3)
        last = statistics.median(size for done, size in samples if end - (end - begin) // 3 <= done < end)
        result |= {f"{name}_mib_early": first, f"{name}_mib_late": last, f"{name}_ratio": last / first}
        flat = flat and abs(last / first - 1) <= 0.05
    early = max(size for done, size in disk if done <= steps // 2)
    late = max(size for _, size in disk)
    return {**result, "disk_mib_first_half": early, "disk_mib": late, "flat": flat}


class Letter(Env):
    """One turn, a reward that differs within a group."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        """Nothing is random."""
        return [{"role": "user", "content": f"row {self.row['n']} " * 20}], {}

    async def step(self, action: Message) -> Step:
        """The reward is the last character's."""
        return Step([], float(ord(action["content"][-1]) % 7), True, False, {})


async def scripted(folder: Path, steps: int) -> dict[str, Any]:
    """The controller's parts, joined as a run joins them."""
    dice = random.Random(0)
    engine = ScriptedEngine(lambda _: dice.choices(range(97, 123), k=200), delay=0.5)
    options = RolloutOptions(groups_per_step=8, samples=8, staleness=2)
    pool = await Pool.open(folder / "pool.sqlite")
    runner = Runner(
        options,
        pool=pool,
        rows=[{"n": n} for n in range(1000)],
        seed=0,
        env="letter",
        make_env=Letter,
        make_agent=Agent,
        open_session=byte_sessions(engine),
    )
    await runner.start(engine.version, None)
    rollouts = asyncio.create_task(runner.run())
    seen: dict[str, list[tuple[int, float]]] = defaultdict(list)
    disk: list[tuple[int, float]] = []
    cursors: list[Any] = []
    try:
        for step in range(steps):
            take = await runner.take(step, engine.version, 600.0)
            if take is None:
                raise RuntimeError(f"step {step}: no batch in 600 s, {runner.waits_for()}")
            cursors.append(take.cursor)
            engine.requests.clear()
            engine.set_version(Version(1, step + 1))
            await runner.published(engine.version)
            if step % 10 == 9:  # a checkpoint, and two are kept
                await runner.retain(cursors[-20 if len(cursors) >= 20 else 0])
            seen["controller"].append((step, psutil.Process().memory_info().rss / 2**20))
            disk.append((step, disk_mib(folder)))
    finally:
        rollouts.cancel()
        await asyncio.wait([rollouts])
        await pool.close()
    return report(seen, disk, steps)


def main() -> int:
    """Observe in a temporary folder and print; exit code 1 where memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scripted", action="store_true", help="no engine, no trainer, virtual time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.scripted:
            found = run_virtual(scripted(Path(folder), options.steps))
        else:
            found = observe(Path(folder), options.steps)
    print(json.dumps(found))
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
