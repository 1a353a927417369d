"""A run in which every published version is proved to have arrived: on the embedded engine, and on a real SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.monitor.metrics import read_metrics
from agentrl.testing.tiny import make_tiny_model
from tests.conductor.kit import PUBLISHED

ROOT = Path(__file__).resolve().parents[2]
ENV = """
import asyncio, json, time
from agentrl.envs.calculator import Calculator

class Lingering(Calculator):
    \"\"\"One episode at a time, and of each group at most one, waits after its first turn for a publish.\"\"\"
    lingers, lingered = False, set()
    async def step(self, action):
        told = await super().step(action)
        question = self.row["question"]
        if not (told.terminated or told.truncated or Lingering.lingers or question in Lingering.lingered):
            Lingering.lingers = True
            Lingering.lingered.add(question)
            try:
                await published()
            finally:
                Lingering.lingers = False
        return told
"""
RUN = """
name = "r"
model = "model"
[env]
path = "env.py:Lingering"
[data]
train_limit = 64
[rollout]
groups_per_step = 2
samples = 4
max_turns = 3
max_tokens = 400
filter_equal = false
staleness = 2
[eval]
every = 0
[train]
steps = 15
lr = 1e-3
checkpoint_every = 1
keep_checkpoints = 99
"""


@pytest.mark.parametrize("weights", ["disk", "group"])
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("embedded", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(900)]),
    ],
)
def test_every_published_version_is_what_the_trainer_made(engine: str, weights: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", layers=1, hidden=32, intermediate=32, max_length=768)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "env.py").write_text(ENV + PUBLISHED)
    overrides = [f'engine.kind="{engine}"', f'train.weights="{weights}"']
    if engine == "sglang":
        python = os.environ.get("AGENTRL_SGLANG_PYTHON")
        if not python:
            pytest.skip("set AGENTRL_SGLANG_PYTHON to an interpreter that has SGLang")
        overrides.append(f'engine.python="{python}"')
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    train = [sys.executable, "-m", "agentrl.cli", "train", "run.toml", *overrides]
    done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    proof = subprocess.run(
        [sys.executable, str(ROOT / "examples/prove_publishes.py"), "runs/r", "--first", "model"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert proof.returncode == 0, proof.stdout + proof.stderr
    verdict = json.loads(proof.stdout.splitlines()[-1])
    assert verdict["wrong"] == []
    published = [line for line in read_metrics(tmp_path / "runs/r/metrics.jsonl") if line["kind"] == "publish"]
    assert len(published) >= 5, "at staleness 2 a version overtakes two at most"
    assert [line["publish/over_group"] for line in published] == [float(weights == "group")] * len(published)
    # The last versions sample nothing that is kept: the run is over when they are out.
    assert len(verdict["proved"]) >= 5
    assert verdict["trajectories_of_several_versions"] > 0
