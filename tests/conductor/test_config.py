"""What the sections of a run's config settle between them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.conductor.config import RunConfig


def read(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "x", "model": "m", "env": {"path": "a:B"}, **sections})


@pytest.mark.parametrize(
    ("algorithm", "filters"),
    [
        ({}, True),
        ({"name": "gspo"}, True),
        ({"name": "ppo"}, False),
        ({"name": "reinforce_pp"}, False),
        ({"credit": "turn"}, False),
        ({"name": "my:Own"}, True),
    ],
)
def test_equal_groups_are_filtered_where_they_teach_nothing(algorithm: dict[str, Any], filters: bool) -> None:
    assert read(algorithm=algorithm).rollout.filter_equal is filters
    assert read(algorithm=algorithm, rollout={"filter_equal": True}).rollout.filter_equal


def test_one_sample_is_enough_with_a_critic() -> None:
    assert read(algorithm={"name": "ppo"}, rollout={"samples": 1}).rollout.samples == 1
    with pytest.raises(ValidationError, match="filter_equal"):
        read(rollout={"samples": 1})


def test_a_wrong_algorithm_is_reported_in_its_place() -> None:
    with pytest.raises(ValidationError, match=r"algorithm\n.*did you mean 'grpo'"):
        read(algorithm={"name": "grop"})


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"eval": {"gpus": [0]}}, r"eval\.gpus has no effect"),
        ({"eval": {"engine": "own", "gpus": [0]}}, r"eval\.gpus has no effect"),
        ({"eval": {"engine": "own", "every": 0}}, r"eval\.engine has no effect with eval\.every = 0"),
        ({"eval": {"engine": "own"}, "engine": {"kind": "sglang", "gpus": [0]}}, "needs 1 GPUs of its own"),
    ],
)
def test_an_engine_set_aside_that_cannot_be(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        read(**sections)
    read(eval={"engine": "own", "gpus": [1]}, engine={"kind": "sglang", "gpus": [0]})
