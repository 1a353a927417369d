"""The learning rate's course."""

from __future__ import annotations

import pytest

from agentrl.train.options import TrainOptions
from agentrl.train.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    options = TrainOptions.model_validate({"steps": 6, "lr": 1.0, "warmup_steps": 2, "schedule": schedule})
    assert [learning_rate(options, step) for step in range(1, 7)] == pytest.approx(expected, rel=1e-5)
