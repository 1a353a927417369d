"""A run on a Ray cluster of this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.conductor.kit import finished, lines, make_place, start

SETTINGS = (
    "cluster.kind=ray",
    "cluster.ray_engine={CPU=0.1}",
    "cluster.ray_trainer={CPU=0.1}",
    "cluster.ray_rollout={CPU=0.1}",
    "cluster.rollout_workers=1",
    "train.ranks=2",
    "engine.count=2",
    "eval.every=1000",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'agentrl[ray]'")
def test_a_run_placed_by_ray(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    run = place / "runs" / "r"
    process = start(place, "train", "run.toml", *SETTINGS, "train.steps=4")
    code, output = finished(process, 500)
    assert code == 0, output
    assert [s["version"] for s in lines(run, "step")] == ["1.1", "1.2", "1.3", "1.4"]
    assert lines(run, "step")[0]["behaviour/abs_log_weight_max"] < 1e-3


def test_without_ray_it_is_said(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    place = make_place(tmp_path)
    code, output = finished(start(place, "train", "run.toml", "cluster.kind=ray"))
    assert code == 2, output
    assert "pip install 'agentrl[ray]'" in output
