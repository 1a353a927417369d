"""/metrics, read with the reference parser."""

from __future__ import annotations

import math

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from agentrl.monitor.openmetrics import exposition

STATE = {
    "gauges": {
        "engine_tokens_total": 12,
        "engine_idle_seconds_total": 1.5,
        "gate_groups_live": 3,
        "trainer_silent_seconds": 0.25,
        "odd": "text",
    }
}
LAST = {"step": 7, "reward/mean": 0.5, "loss": math.nan, 'envs/A "b"\\\n/reward': 0.75, "envs/C/reward": 0.25}


def samples(text: str) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found[sample.name, sample.labels.get("env", "")] = sample.value
    return found


def test_a_living_run_tells_its_gauges_counters_and_last_figures() -> None:
    found = samples(exposition(STATE, LAST, True))
    assert found["agentrl_engine_tokens_total", ""] == 12
    assert found["agentrl_engine_idle_seconds_total", ""] == 1.5
    assert found["agentrl_gate_groups_live", ""] == 3
    assert found["agentrl_up", ""] == 1
    assert found["agentrl_step_reward_mean", ""] == 0.5
    assert math.isnan(found["agentrl_step_loss", ""])
    assert found["agentrl_env_reward", 'A "b"\\\n'] == 0.75
    assert found["agentrl_env_reward", "C"] == 0.25
    assert not any("odd" in name for name, _ in found)


def test_a_run_that_ended_tells_no_stale_gauges() -> None:
    found = samples(exposition(STATE, {}, False))
    assert found == {("agentrl_up", ""): 0}
