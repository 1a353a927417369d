"""The whole loop on this machine: `make demo`.

    python examples/demo.py --engine embedded --seed 0        # or --engine sglang, with AGENTRL_SGLANG_PYTHON

1. makes a tiny random model;
2. `agentrl sft`: imitates synthetic conversations, where the calculator is used now and then and answers are mostly wrong;
3. `agentrl train`: asynchronous decoupled PPO on arithmetic with feedback and a calculator, evaluated on held-out problems;
4. prints the learning curve and what the run measured. Exit code 1 where the held-out reward stayed under 0.85.

Simplified against a real run: the model has 0.1 million parameters, so that all of it fits a laptop's CPU and minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from agentrl.monitor.metrics import read_metrics
from agentrl.testing.tiny import make_tiny_model

HERE = Path(__file__).resolve().parent
LEARNED = 0.85
BARS = " ▁▂▃▄▅▆▇█"

Line = dict[str, Any]


def main() -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, help="training steps, instead of the config's")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="passed on to `agentrl train`")
    options = parser.parse_args()
    begin = time.monotonic()
    folder: Path = options.run_dir / time.strftime(f"demo-{options.engine}-%Y%m%d-%H%M%S")

    say(f"1/3  a tiny random model → {folder}/tiny")
    model = make_tiny_model(folder / "tiny", seed=options.seed)
    common = [f"seed={options.seed}", f'run_dir="{folder}"']

    say("2/3  agentrl sft examples/calculator_sft.toml")
    at = time.monotonic()
    agentrl("sft", HERE / "calculator_sft.toml", [*common, f'model="{model}"'])
    sft_seconds = time.monotonic() - at

    say("3/3  agentrl train examples/calculator.toml")
    at = time.monotonic()
    overrides = [*common, f'model="{folder}/calculator_sft/model"', *engine(options.engine), *options.overrides]
    if options.steps:
        overrides.append(f"train.steps={options.steps}")
    agentrl("train", HERE / "calculator.toml", overrides)
    train_seconds = time.monotonic() - at

    lines = list(read_metrics(folder / "calculator" / "metrics.jsonl"))
    learned = report(lines, folder / "calculator")
    print(f"seconds: imitation {sft_seconds:.0f}, training {train_seconds:.0f}, all {time.monotonic() - begin:.0f}")
    return 0 if learned or options.steps else 1


def engine(kind: str) -> list[str]:
    """The overrides that choose the engine; SGLang lives in an environment of its own."""
    if kind == "embedded":
        return []
    python = os.environ.get("AGENTRL_SGLANG_PYTHON", ".cache/sglang/bin/python")
    if not Path(python).exists():
        sys.exit(f"no SGLang at {python}: bash examples/sglang_cpu/install.sh .cache/sglang (or AGENTRL_SGLANG_PYTHON)")
    return ['engine.kind="sglang"', f'engine.python="{python}"']


def agentrl(command: str, config: Path, overrides: Sequence[str]) -> None:
    """One agentrl command; its failure is ours."""
    done = subprocess.run([sys.executable, "-m", "agentrl.cli", command, str(config), *overrides], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def report(lines: Sequence[Line], run: Path) -> bool:
    """Print what the run shows; whether it learned."""
    steps = [line for line in lines if line["kind"] == "step"]
    evals = [line for line in lines if line["kind"] == "eval" and line.get("eval/reward") is not None]
    before, after = evals[0]["eval/reward"], evals[-1]["eval/reward"]
    rewards = [line["reward/mean"] for line in steps if line.get("reward/mean") is not None]
    gaps = [line["publish/longest_gap_ms"] for line in steps if line.get("publish/longest_gap_ms") is not None]
    say("what the run shows")
    print(f"training reward   {curve(rewards)}  {rewards[0]:.2f} → {rewards[-1]:.2f}")
    held_out = "  ".join(f"{line['step']}: {line['eval/reward']:.3f}" for line in evals)
    print(f"held-out reward   {held_out}")
    print(f"held-out, before → after      {before:.3f} → {after:.3f}   (learned: ≥ {LEARNED})")
    print(f"versions published            {max(line.get('publish/count', 0) for line in steps)}")
    print(f"oldest token trained on       {max(line['staleness/max'] for line in steps):.0f} versions (bound 4)")
    share = median(line["staleness/several_versions_share"] for line in steps)
    print(f"trajectories of several versions, median step   {share:.0%}")
    if gaps:
        print(f"longest gap in tokens a publish   median {median(gaps):.0f} ms, worst {max(gaps):.0f} ms")
    print(f"picture           {run / 'curve.png'}")
    return bool(after >= LEARNED)


def curve(values: Sequence[float], width: int = 60) -> str:
    """Values in [0, 1] as a line of bars."""
    step = max(1, -(-len(values) // width))
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    return "".join(BARS[min(8, max(0, round(8 * value)))] for value in means)


def say(text: str) -> None:
    """A heading."""
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
