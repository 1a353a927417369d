"""The coding example, whole: programs of a tiny model are run in sandboxes, and it learns to write right ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not (shutil.which("bwrap") and shutil.which("busybox")), reason="needs bubblewrap and busybox")
def test_it_learns_to_program(tmp_path: Path) -> None:
    data, model = tmp_path / "conversations.jsonl", tmp_path / "tiny"
    run("examples/code_agent_sft.py", str(model), str(data))
    place = (f"run_dir={tmp_path}",)
    run(
        "-m",
        "agentrl.cli",
        "sft",
        "examples/code_agent_sft.toml",
        *place,
        "name=sft",
        f"model={model}",
        f"sft.data={data}",
    )
    run("-m", "agentrl.cli", "train", "examples/code_agent.toml", *place, "name=ppo", f"model={tmp_path / 'sft/model'}")
    rewards = [
        line["eval/reward"] for line in read_metrics(tmp_path / "ppo" / "metrics.jsonl") if line["kind"] == "eval"
    ]
    assert rewards[-1] > rewards[0] + 0.25, rewards
