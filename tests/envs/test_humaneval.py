"""HumanEval's rows through the coding environment, as examples/smollm2_humaneval.toml says, with the real model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.reward.code.grade import find_program
from agentrl.reward.code.task import parse_task
from agentrl.rollout.pool import Pool
from agentrl.types import Episode
from examples.benchmark_rows import human_eval
from examples.fetch_smollm2 import fetch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not (shutil.which("bwrap") and shutil.which("busybox")), reason="needs bubblewrap and busybox")
async def test_smollm2_plays_rows_and_each_program_is_judged(tmp_path: Path) -> None:
    model = fetch()
    command = ["rollout", "examples/smollm2_humaneval.toml", "--groups", "2", f"model={model}", f"run_dir={tmp_path}"]
    command += ["rollout.groups_per_step=2", "rollout.samples=2", "rollout.max_tokens=160", "monitor.page=false"]
    done = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-m", "agentrl.cli", *command], cwd=ROOT, capture_output=True, text=True, timeout=1400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    pool = await Pool.open(tmp_path / "smollm2_humaneval" / "pool.sqlite")
    groups = [await pool.group(position) for position in (0, 1)]
    await pool.close()
    rows = {row["task_id"] for row in human_eval()}
    for episode in (episode for group in groups for episode in group.episodes):
        assert episode.row["task_id"] in rows
        assert episode.reward in (0.0, 1.0), "a verdict"
        (status,) = statuses(episode)
        program = find_program(str(episode.messages[-1]["content"]), parse_task(episode.row))
        assert (status == "code_no_code") is (program is None), (status, episode.messages[-1])
        assert (status == "code_passed") is (episode.reward == 1.0)


def statuses(episode: Episode) -> list[str]:
    """The verdict's name, from the parts of the only turn's reward."""
    (turn,) = episode.turns
    return [name for name in turn.parts if name.startswith("code_")]
