"""The whole loop on this machine's CPU: a tiny model learns to use a calculator by asynchronous decoupled PPO.

    python examples/demo.py                      # make demo
    python examples/demo.py --engine sglang      # the same against a real SGLang server (AGENTRL_SGLANG_PYTHON)

Makes a random model, teaches it the format from synthetic conversations (`agentrl sft`), trains it (`agentrl train`),
and compares held-out problems before and after. Ends with an error if the model did not learn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.monitor.metrics import read_metrics
from agentrl.testing.tiny import make_tiny_model

HERE = Path(__file__).parent
GOAL = 0.85
LEAST_VERSIONS = {"embedded": 20, "sglang": 5}


def main() -> None:
    """Run both stages and report; exit code 1 where the model did not learn."""
    options = _options()
    started = time.monotonic()
    folder: Path = options.folder
    for name in ("sft", "ppo"):
        shutil.rmtree(folder / name, ignore_errors=True)  # what an earlier demo left
    model = make_tiny_model(folder / "tiny", seed=options.seed)
    data = folder / "conversations.jsonl"
    _run(str(HERE / "calculator_sft.py"), str(data), "--seed", str(options.seed))
    common = (f"run_dir={folder}", f"seed={options.seed}")
    _agentrl("sft", "calculator_sft.toml", *common, "name=sft", f"model={model}", f"sft.data={data}")
    stage_two = time.monotonic()
    overrides = [*_engine(options.engine), *([f"train.steps={options.steps}"] if options.steps else [])]
    model = folder / "sft/model"
    _agentrl("train", "calculator.toml", *common, "name=ppo", f"model={model}", *overrides, *options.overrides)
    minutes = {
        "stage one (sft)": (stage_two - started) / 60,
        "stage two (ppo)": (time.monotonic() - stage_two) / 60,
    }
    learned = _report(folder / "ppo", minutes, LEAST_VERSIONS[options.engine])
    sys.exit(0 if learned or options.steps else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, help="fewer training steps; then learning is no condition")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="passed on to `agentrl train`")
    return parser.parse_args()


def _engine(kind: str) -> Sequence[str]:
    if kind == "embedded":
        return ()
    python = os.environ.get("AGENTRL_SGLANG_PYTHON", ".cache/sglang/bin/python")
    if not Path(python).exists():
        sys.exit(
            f"there is no interpreter with SGLang at {python}: set AGENTRL_SGLANG_PYTHON, or on a CPU make one with "
            "bash examples/sglang_cpu/install.sh .cache/sglang"
        )
    return "engine.kind=sglang", f"engine.python={python}", "engine.max_running=32", "rollout.concurrency=128"


def _agentrl(command: str, config: str, *overrides: str) -> None:
    path = os.path.relpath(HERE / config)
    print(f"\n$ agentrl {command} {path} {' '.join(overrides)}", flush=True)
    _run("-m", "agentrl.cli", command, path, *overrides)


def _run(*arguments: str) -> None:
    if code := subprocess.call([sys.executable, *arguments]):
        sys.exit(code)


def _report(run: Path, minutes: dict[str, float], least_versions: int) -> bool:
    lines = list(read_metrics(run / "metrics.jsonl"))
    evals = [line for line in lines if line["kind"] == "eval" and line["eval/reward"] is not None]
    steps = [line for line in lines if line["kind"] == "step"]
    published = sum(line["kind"] == "publish" for line in lines)
    first, last = evals[0]["eval/reward"], evals[-1]["eval/reward"]
    table = Table(title="held-out problems, and how they were learned", show_header=False)
    table.add_row("reward before", f"{first:.3f}")
    table.add_row("reward after", f"{last:.3f}", style="bold")
    table.add_row("on the way, by step", "  ".join(f"{e['step']}: {e['eval/reward']:.2f}" for e in evals))
    table.add_row("versions published", str(published))
    for name, value in (*_figures(steps), *((k, f"{v:.1f} min") for k, v in minutes.items())):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(_curve([line["reward/mean"] for line in steps if line.get("reward/mean") is not None]))
    console.print(f"learning curve: {run / 'curve.png'}")
    learned = bool(last >= max(GOAL, first + 0.3) and published >= least_versions)
    if not learned:
        console.print(f"not learned: reward {last:.3f} of {GOAL}, {published} of {least_versions} versions published")
    return learned


def _figures(steps: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    def values(key: str) -> list[float]:
        return [line[key] for line in steps if isinstance(line.get(key), int | float)]

    if oldest := values("staleness/max"):
        yield "oldest trained token", f"{max(oldest):.0f} versions"
    if several := values("staleness/several_versions_share"):
        yield "trajectories with several versions", f"{100 * sum(several) / len(several):.0f} %"
    if gaps := values("publish/longest_gap_ms"):
        yield "longest gap in tokens a publish", f"{median(gaps):.0f} ms in the median, {max(gaps):.0f} ms at worst"


def _curve(rewards: Sequence[float], width: int = 60) -> str:
    if not rewards:
        return ""
    per = max(1, -(-len(rewards) // width))
    means = [sum(part) / len(part) for part in (rewards[i : i + per] for i in range(0, len(rewards), per))]
    bars = "▁▂▃▄▅▆▇█"
    return "reward " + "".join(bars[min(7, max(0, int(8 * mean)))] for mean in means) + f" {means[-1]:.2f}"


if __name__ == "__main__":
    main()
