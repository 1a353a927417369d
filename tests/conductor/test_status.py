"""`agentrl status`: a live run, one that died, and no run at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.conductor import status
from agentrl.conductor.folder import RunFolder
from agentrl.conductor.status import describe
from agentrl.errors import ConfigError
from agentrl.monitor.metrics import MetricsFile


def test_who_waits_for_what_is_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.open(resume=False)
    folder.config.write_text("name = 'r'\n")
    metrics = MetricsFile(folder.metrics)
    metrics.write("step", {"step": 3, "version": "1.3", "reward/mean": 0.5})
    metrics.write("eval", {"step": 2, "eval/reward": 0.25})
    metrics.close()
    state = {
        "phase": "training",
        "time": 1000.0,
        "steps": 10,
        "gate": "4 of 20 groups live",
        "pool": "2 groups wait for the trainer, 4 are with it, a batch is 4",
        "engines": "all serve, 7 requests in flight",
        "trainer": "trainer rank 0 waits for 'train' of step 4 to end (3 s)",
        "waits": ["trainer rank 0 waits for 'train' of step 4 to end (3 s)"],
    }
    folder.write_state(state)
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: 1002.0))
    text = describe(tmp_path / "r")
    assert text.startswith("r: training (said 2 s ago)")
    assert "step 3/10" in text
    assert "evaluation at step 2" in text
    for key in ("gate", "pool", "engines", "trainer"):
        assert f"{key}: {state[key]}" in text
    assert "waits, longest first:\n  trainer rank 0 waits" in text

    folder.close()  # as when the process is killed: the lock goes with it
    assert describe(tmp_path / "r").startswith("r: died while training: continue with agentrl train RUN.TOML --resume")


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run's folder"):
        describe(tmp_path)
