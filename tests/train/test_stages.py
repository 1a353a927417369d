"""The three stages' configs: the published settings, valid here, and one after the other on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentrl.conductor.check import check_run, check_sft
from agentrl.conductor.config import RunConfig, SftConfig
from agentrl.config import load
from agentrl.testing.tiny import make_tiny_model
from tests.conductor.kit import ENV

ROOT = Path(__file__).resolve().parents[2]
LOWER = '["model.embed_tokens.weight","model.layers.0.*"]'
STAGES = ROOT / "examples" / "stages"


def test_stage_one_is_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    model = make_tiny_model(tmp_path / "model", max_length=4096)
    plan = check_sft(load(SftConfig, STAGES / "1_sft.toml", [f"model={model}", "sft.limit=64"]))
    assert len(plan.train) + len(plan.held_out) == 64


@pytest.mark.parametrize("name", ["2_rl", "3_transfer"])
def test_stages_two_and_three_are_valid_and_have_the_published_settings(name: str) -> None:
    config = load(RunConfig, STAGES / f"{name}.toml")
    check_run(config, model_needed=False)
    algorithm, train = config.algorithm, config.train
    assert algorithm.name == "ppo"
    assert (algorithm.kl_coef, algorithm.kl_in, algorithm.kl_estimator) == (0.2, "reward", "k1")
    assert (algorithm.gae_lambda, algorithm.discount, algorithm.clip_low, algorithm.clip_high) == (0.95, 1.0, 0.2, 0.2)
    assert config.rollout.groups_per_step * config.rollout.samples == 1024
    assert train.lr == (5e-6 if name == "2_rl" else 1e-6)
    assert bool(train.frozen) == (name == "3_transfer")
    assert not config.rollout.filter_equal, "a critic learns from equal rewards too"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_one_stage_after_the_other_on_a_tiny_model(tmp_path: Path) -> None:
    """Each starts from the last one's model; in the third only the upper layer moves."""
    make_tiny_model(tmp_path / "tiny", hidden=32, intermediate=32, max_length=512)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "env.py").write_text(ENV)
    short = ["train.warmup_steps=0", 'train.dtype="fp32"', "train.checkpoint_every=0"]
    small = ['engine.kind="embedded"', 'engine.dtype="float32"', "engine.context_length=256", "rollout.max_tokens=24"]
    small += ["rollout.groups_per_step=4", "rollout.concurrency=8", "train.steps=1", "train.minibatches=2"]
    small += ["eval.rows=4", "engine.startup_timeout=900"]
    stages = {
        "1_sft": ["sft", 'model="tiny"', "sft.limit=64", "train.steps=2", "train.batch_groups=8"],
        "2_rl": ["train", *small],
        # A task in which a random model earns something: without any reward there is nothing to learn from.
        "3_transfer": ["train", *small, 'env.path="env.py:Bright"', f"train.frozen={LOWER}"],
    }
    for name, (command, *overrides) in stages.items():
        done = subprocess.run(
            [sys.executable, "-m", "agentrl.cli", command, str(STAGES / f"{name}.toml"), *overrides, *short],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    second, third = (load_file(tmp_path / "runs" / name / "model" / "model.safetensors") for name in list(stages)[1:])
    moved = {name for name in second if not second[name].equal(third[name])}
    assert moved
    assert all(".layers.1." in name or name == "model.norm.weight" for name in moved), moved
    steps = [json.loads(line) for line in (tmp_path / "runs" / "3_transfer" / "metrics.jsonl").read_text().splitlines()]
    assert [line["kl/reference"] for line in steps if line["kind"] == "step"]
