"""Against TRL's GRPOTrainer: the same model, task, batch (8 prompts × 8), lengths, precision (fp32) and two cores.

    python examples/benchmarks/vs_trl.py                                  # a 2M-parameter model
    python examples/benchmarks/vs_trl.py --smollm2 .cache/models/smollm2-135m-instruct       # and SmolLM2-135M
    python examples/benchmarks/vs_trl.py --parts multiturn                                   # a part alone

TRL is installed into `.cache/trl` and shares this environment's torch and transformers. It generates and trains in one
process with two threads; ours are an engine with one thread and a trainer with two, side by side. What is rewarded is
the share of the letters a to m in an answer of at most 32 tokens, which a random model can climb. Both learn at the
same rate, with AdamW (0.9, 0.95), without a reference. Ours learns from answers of the last version (η = 1), and in the
race to a reward, which is over in a few steps, of the present one, as TRL does (η = 0).

    step_ratio             their seconds a step / ours in steady state, SmolLM2-135M
    cpu_ratio              the same of CPU seconds, over all processes of a side
    step_ratio_tiny        as `step_ratio`, the tiny model
    time_to_reward_ratio   their seconds from the start of the process, imports and all, to a mean reward of 0.9 over
                           three steps / ours, tiny
    ratio_multiturn        as `step_ratio`, five turns of 16 tokens with a tool's 120 tokens after each, tiny; the sides
                           run alternately, twice each, since the machine's speed drifts by the minute

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.monitor.metrics import read_metrics
from agentrl.testing.tiny import CALCULATOR, FORMAT, SPECIAL, make_tiny_model
from agentrl.types import Info, Message, Row, Step

TRL = "trl==1.16.0"
HOME = Path(__file__).resolve().parents[2] / ".cache" / "trl"
FIRST = 2
"""Steps before the clock starts."""
WORDS, TURNS, TURN_WORDS = 32, 5, 16
ODD = "|".join(map(re.escape, (*SPECIAL, *FORMAT, *CALCULATOR)))
"""The tiny model's long tokens, each read as one other letter: one of them that has many letters would be a summit of
its own, and the way down from there is luck."""
TOLD = "The tool has looked it up and says the following, please go on with it: " + "lorem ipsum " * 4
CONFIG = f"""
name = "NAME"
model = "MODEL"
[env]
path = "{Path(__file__).resolve()}:Early"
[agent]
path = "{Path(__file__).resolve()}:Brief"
[rollout]
groups_per_step = 8
samples = 8
staleness = 1
concurrency = 64
shuffle = false
filter_equal = false
[engine]
max_running = 64
context_length = 1024
[train]
checkpoint_every = 0
threads = 2
[eval]
every = 0
"""


class Early(Env):
    """`turns` turns; rewards the share of the letters a to m in all that was said."""

    def __init__(self, row: Row, *, turns: int = 1) -> None:
        super().__init__(row)
        self.turns, self.said = turns, ""

    @classmethod
    def rows(cls, split: str, seed: int) -> list[Row]:
        """Topics."""
        return [{"topic": f"{split} {i}"} for i in range(4096)]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The topic."""
        return [{"role": "user", "content": f"Talk about {self.row['topic']}."}], {}

    async def step(self, action: Message) -> Step:
        """The tool's words, until the last turn."""
        self.said += action.get("content") or ""
        self.turns -= 1
        said = re.sub(ODD, "-", self.said)
        reward = sum(c.lower() in "abcdefghijklm" for c in said) / max(len(said), 1)
        over = self.turns == 0
        return Step([{"role": "user", "content": TOLD}], reward if over else 0.0, over, False, {})


class Brief(Agent):
    """So many tokens a turn."""

    def __init__(self, tools: Sequence[Any] = (), *, words: int = WORDS) -> None:
        super().__init__(tools)
        self.words = words

    async def act(self, observation: list[Message], client: Any) -> Message:
        """Answer."""
        self.messages += observation
        reply = await client.chat.completions.create(model="policy", messages=self.messages, max_tokens=self.words)
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return self.messages[-1]


class Side(NamedTuple):
    """Seconds since the process was started and CPU seconds, at the end of each step; and mean rewards."""

    marks: list[tuple[float, float]]
    rewards: list[float]

    @property
    def step(self) -> float:
        """Seconds of a step in steady state."""
        return (self.marks[-1][0] - self.marks[FIRST - 1][0]) / (len(self.marks) - FIRST)

    @property
    def cpu(self) -> float:
        """CPU seconds of a step."""
        return (self.marks[-1][1] - self.marks[FIRST - 1][1]) / (len(self.marks) - FIRST)

    def until(self, enough: float) -> float | None:
        """Seconds to a mean reward of `enough` over three steps; None where it was not seen."""
        for i in range(2, len(self.rewards)):
            if sum(self.rewards[i - 2 : i + 1]) / 3 >= enough:
                return self.marks[min(i, len(self.marks) - 1)][0]
        return None


def trl_python() -> Path:
    """An interpreter with TRL beside this environment's packages."""
    python = HOME / "venv" / "bin" / "python"
    packages = HOME / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    if not (packages / "trl").is_dir():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", HOME / "venv"], check=True)
        (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), TRL]
        subprocess.run(pip, check=True)
    return python


def theirs(model: Path, work: Path, **settings: object) -> Side:
    """TRL's run."""
    command = [str(trl_python()), str(Path(__file__).with_name("trl_side.py")), "--model", str(model)]
    command += ["--out", str(work / "trl"), "--odd", ODD]
    for name, value in settings.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    threads = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "TRL_EXPERIMENTAL_SILENCE": "1"}
    begun = time.time()
    done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Side([(at - begun, cpu) for at, cpu in found["marks"]], found["rewards"])


def ours(name: str, model: Path, work: Path, overrides: Sequence[str], enough: float = 2.0) -> Side:
    """Our run, watched from outside: a step's CPU seconds are those of all its processes."""
    config = work / f"{name}.toml"
    config.write_text(CONFIG.replace("NAME", name).replace("MODEL", str(model)))
    command = [sys.executable, "-m", "agentrl.cli", "train", str(config), *overrides]
    folder = work / "runs" / name
    cpu: list[float] = []
    begun = time.time()
    with (work / f"{name}.log").open("w") as log:
        run = subprocess.Popen(
            command, cwd=work, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
        )
        watched, size = psutil.Process(run.pid), 0
        lines: list[dict[str, Any]] = []
        while run.poll() is None:
            time.sleep(0.02)
            # Watching takes of the cores that it measures.
            written = size_of(folder)
            if written == size:
                continue
            size, lines = written, steps_of(folder)
            if len(lines) > len(cpu):
                cpu += [cpu_seconds(watched)] * (len(lines) - len(cpu))
            rewards = [line["reward/mean"] for line in lines]
            if len(rewards) >= 3 and sum(rewards[-3:]) / 3 >= enough:
                run.terminate()
                run.wait()
    lines = steps_of(folder)
    if run.returncode and not (enough <= 1 and lines):
        raise SystemExit(f"our run ended with {run.returncode}:\n{(work / f'{name}.log').read_text()[-4000:]}")
    marks = [(line["time"] - begun, spent) for line, spent in zip(lines, cpu, strict=False)]
    return Side(marks, [line["reward/mean"] for line in lines])


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The run's steps so far."""
    path = folder / "metrics.jsonl"
    return [line for line in read_metrics(path) if line["kind"] == "step"] if path.exists() else []


def size_of(folder: Path) -> int:
    """Bytes of the run's metrics so far."""
    path = folder / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process and all below it."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def train(steps: int, lr: float, *more: str) -> list[str]:
    """Overrides of our run."""
    return [f"train.steps={steps}", f"train.lr={lr}", *more]


def tiny_model(work: Path) -> Path:
    """Two million parameters."""
    return make_tiny_model(work / "tiny", layers=4, hidden=208, intermediate=512, max_length=2048)


def compare(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Both sides of everything that was asked for."""
    tiny = tiny_model(work)
    found: dict[str, Any] = {}

    def told(name: str, side: Side) -> Side:
        rewards = f"{side.rewards[:1]}…{side.rewards[-1:]}"
        print(f"{name}: {side.step:.2f} s and {side.cpu:.2f} CPU s a step; rewards {rewards}", flush=True)
        return side

    if "tiny" in options.parts:
        a = told("TRL, tiny", theirs(tiny, work, steps=options.steps, lr=1e-3))
        b = told("agentrl, tiny", ours("tiny", tiny, work, train(options.steps, 1e-3, "rollout.max_tokens=32")))
        found |= {"step_ratio_tiny": a.step / b.step, "cpu_ratio_tiny": a.cpu / b.cpu}
    if "reward" in options.parts:
        a = theirs(tiny, work, steps=100, lr=1e-3, enough=0.9)
        b = ours("reward", tiny, work, train(100, 1e-3, "rollout.max_tokens=32", "rollout.staleness=0"), enough=0.9)
        times = a.until(0.9), b.until(0.9)
        print(
            f"seconds to reward 0.9: TRL {times[0]} in {len(a.rewards)} steps, agentrl {times[1]} in {len(b.rewards)}"
        )
        found["time_to_reward_ratio"] = times[0] / times[1] if times[0] and times[1] else None
    if "multiturn" in options.parts:
        short = {"turns": TURNS, "words": TURN_WORDS, "told": TOLD}
        more = [f"rollout.max_turns={TURNS}", f"rollout.max_tokens={TURNS * TURN_WORDS}", f"env.args.turns={TURNS}"]
        more += [f"agent.args.words={TURN_WORDS}"]
        steps = [0.0, 0.0]
        for i in range(options.rounds):
            a = told("TRL, five turns", theirs(tiny, work, steps=options.multiturn_steps, lr=1e-4, **short))
            b = told("agentrl, five turns", ours(f"turns{i}", tiny, work, train(FIRST + 6, 1e-4, *more)))
            steps = [steps[0] + a.step, steps[1] + b.step]
        found["ratio_multiturn"] = steps[0] / steps[1]
    if options.smollm2:
        model = options.smollm2.resolve()
        a = told("TRL, SmolLM2", theirs(model, work, steps=options.large_steps, lr=1e-5, at_once=16))
        more = ["rollout.max_tokens=32", "train.tokens_per_microbatch=8192"]
        b = told("agentrl, SmolLM2", ours("smollm2", model, work, train(options.large_steps, 1e-5, *more)))
        found |= {"step_ratio": a.step / b.step, "cpu_ratio": a.cpu / b.cpu}
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="its folder; examples/fetch_smollm2.py makes it")
    parser.add_argument("--parts", nargs="*", default=["tiny", "reward", "multiturn"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--multiturn-steps", type=int, default=FIRST + 3, help="theirs, with five turns")
    parser.add_argument("--rounds", type=int, default=2, help="with five turns: how often the sides take turns")
    parser.add_argument("--large-steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(options, Path(scratch))
    print(json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in found.items()}))


if __name__ == "__main__":
    main()
