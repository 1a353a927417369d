"""Every knob has an effect or is refused, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.train import algorithm
from agentrl.train.__main__ import read_job
from agentrl.train.options import AlgorithmOptions, TrainerJob, TrainOptions, check_algorithm


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "grop"}, "did you mean 'grpo'"),
        ({"name": "grpo", "args": {"x": 1}}, "args"),
        ({"name": "sft", "clip_low": 0.1}, "clip_low has no effect"),
        ({"name": "sft", "behaviour": "mask"}, "behaviour has no effect"),
        ({"aggregation": "fixed_length"}, "fixed_length"),
        ({"fixed_length": 10}, "fixed_length"),
        ({"name": "dr_grpo"}, "needs a length"),
        ({"behaviour": "off", "behaviour_cap": 2.0}, "behaviour_cap has no effect"),
        ({"clip": 0.2}, "clip"),
        ({"behaviour_floor": 0.5}, "behaviour_floor has no effect with behaviour = 'truncate'"),
        ({"behaviour": "off", "behaviour_level": "sequence"}, "behaviour_level has no effect"),
        ({"kl_estimator": "k1"}, "kl_estimator has no effect with kl_coef = 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_coef has no effect with kl_in = 'loss' and kl_estimator = 'k1'"),
        ({"name": "ppo", "kl_coef": 0.1, "kl_in": "loss"}, "take 'k2' or 'k3'"),
        ({"reference": "folder"}, "reference has no effect with kl_coef = 0"),
        ({"gae_lambda": 0.9}, "gae_lambda has no effect with algorithm 'grpo', which has no critic"),
        ({"discount": 0.9}, "discount has no effect with credit = 'episode'"),
        ({"name": "ppo", "credit": "turn"}, "credit has no effect with a critic"),
        ({"name": "ppo", "baseline": "group_std"}, "baseline has no effect with a critic"),
        ({"name": "gspo", "dual_clip": 3.0}, "dual_clip has no effect with algorithm 'gspo'"),
        ({"overlong_buffer": 3}, "overlong_buffer has no effect with overlong_tokens unset"),
        ({"overlong_tokens": 5, "overlong_buffer": 6}, "longer than overlong_tokens"),
    ],
)
def test_algorithm_settings_without_effect_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        AlgorithmOptions(**given)


def test_presets_differ_from_the_defaults_and_give_way() -> None:
    assert AlgorithmOptions(name="dapo").clip_high == 0.28
    assert AlgorithmOptions(name="dapo", clip_high=0.3).clip_high == 0.3
    assert AlgorithmOptions(name="dr_grpo", fixed_length=64).baseline == "group_mean"
    assert AlgorithmOptions(name="ppo").kl_estimator == "k1", "a preset's own settings need no effect"
    assert AlgorithmOptions(name="ppo:PPO", gae_lambda=0.5, baseline="none").gae_lambda == 0.5


def test_where_equal_rewards_teach_nothing() -> None:
    assert [AlgorithmOptions(name=n).contrasts for n in ("grpo", "gspo", "ppo", "reinforce_pp", "sft")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not AlgorithmOptions(credit="turn").contrasts
    assert not AlgorithmOptions(overlong_tokens=5).contrasts


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"minibatches": 9, "batch_groups": 8}, "minibatches"),
        ({"warmup_steps": 11, "steps": 10}, "warmup_steps"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"learning_rate": 1}, "learning_rate"),
    ],
)
def test_train_settings_that_cannot_work_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainOptions(**given)


def test_an_own_algorithm_must_be_importable() -> None:
    check_algorithm(AlgorithmOptions(name="tests.train.test_options:Anything"))
    for name in ("no_such_module:Thing", "tests.train.test_options:"):
        with pytest.raises((ValueError, ModuleNotFoundError)):
            check_algorithm(AlgorithmOptions(name=name))


@pytest.mark.parametrize(
    "given", [{"name": "sft"}, {"name": "dapo"}, {"behaviour": "off"}, {"name": "ppo", "kl_coef": 0.2}]
)
def test_a_job_survives_its_file(tmp_path: Path, given: dict[str, Any]) -> None:
    job = TrainerJob(
        run="r",
        train=TrainOptions(lr=1e-3, betas=(0.8, 0.9)),
        algorithm=AlgorithmOptions(**given),
        model_dir=tmp_path,
        feed_url="http://127.0.0.1:1",
        weights_dir=tmp_path,
        checkpoints_dir=tmp_path,
        resume=tmp_path / "step-0000001",
    )
    assert TrainerJob.model_validate_json(job.model_dump_json(exclude_unset=True)) == job


def test_a_jobs_folders_are_looked_at_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    job = TrainerJob(
        run="r",
        train=TrainOptions(),
        algorithm=AlgorithmOptions(kl_coef=0.1, reference=tmp_path / "none"),
        model_dir=tmp_path / "model",
        feed_url="http://127.0.0.1:1",
        weights_dir=tmp_path,
        checkpoints_dir=tmp_path,
    )
    file = tmp_path / "trainer.json"
    for given, what in ((job, "reference"), (job.model_copy(update={"model_dir": tmp_path / "no"}), "model")):
        file.write_text(given.model_dump_json(exclude_unset=True))
        with pytest.raises(ConfigError, match=f"{what} folder .* has no config.json"):
            read_job(file)


def test_options_and_checkpoints_need_no_torch() -> None:
    code = "import sys, agentrl.train.options, agentrl.train.checkpoint, agentrl.train.plan, agentrl.train.feed; "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


def test_names_that_lead_nowhere() -> None:
    for name in ("no.such.module:X", "agentrl.train.algorithm:Nothing", "agentrl.train.algorithm:mean"):
        with pytest.raises(ConfigError, match="algorithm"):
            algorithm.load(AlgorithmOptions(name=name))
