"""Each algorithm teaches a tiny model a task of three turns, on policy and with data four versions old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.train import algorithm
from agentrl.train.options import AlgorithmOptions
from tests.train.playing import TURNS, learn, make_model

LR = 1e-2
SHIPPED: dict[str, tuple[dict[str, Any], float]] = {
    "grpo": ({"kl_coef": 0.001, "entropy_bonus": 0.001}, LR),
    "dr_grpo": ({"fixed_length": TURNS}, LR),
    "rloo": ({"credit": "turn", "discount": 0.9}, LR),
    "reinforce_pp": ({"kl_coef": 0.01}, LR),
    "reinforce_pp_baseline": ({"dual_clip": 3.0}, LR),
    "dapo": ({"overlong_tokens": 8, "overlong_buffer": 4}, LR),
    "gspo": ({"clip_low": 0.2, "clip_high": 0.2}, LR),
    "cispo": ({}, LR),
    "tis": ({"behaviour_level": "geometric"}, LR),
    "icepop": ({}, LR),
    "ppo": ({"value_rate": 1.0, "kl_coef": 0.001}, LR / 2),
}
CASES = [*SHIPPED, "ppo/turn"]
QUICK = ("grpo", "rloo", "gspo", "cispo", "ppo", "ppo/turn")
"""One of each code path; the others differ from these in settings alone."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("partners"))


def check(model: Path, case: str, lag: int) -> None:
    name, _, steps = case.partition("/")
    more, lr = SHIPPED[name]
    given = {"name": name, **more, **({"gae_steps": steps} if steps else {})}
    chosen = algorithm.load(AlgorithmOptions.model_validate(given))
    rewards, metrics = learn(model, chosen, steps=60, lr=lr, minibatches=2, lag=lag, enough=0.85)
    assert rewards[0] < 0.2
    assert max(rewards) > 0.85, rewards
    assert len(rewards) < 60, rewards
    assert metrics[-1]["staleness/max"] == lag
    assert abs(metrics[0]["behaviour/weight_mean"] - 1) < 1e-4, "log-probs of sampler and trainer differ"


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_it_learns_from_data_four_versions_old(model: Path, case: str) -> None:
    check(model, case, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_learns_on_policy(model: Path, case: str) -> None:
    check(model, case, 0)
