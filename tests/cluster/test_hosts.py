"""Whole runs over three hosts. The ledger is the judge."""

from __future__ import annotations

import json
import os

import pytest

from tests.cluster.hosts import why_not
from tests.cluster.kit import Cluster, ledger
from tests.conductor.kit import lines

SFT = """
name = "s"
model = "model"
[sft]
data = "talk.jsonl"
[train]
steps = 3
ranks = 2
batch_groups = 4
[monitor]
page = false
[cluster]
kind = "external"
host = "10.77.0.1"
lost_seconds = 60
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_over_three_hosts_with_nothing_shared(cluster: Cluster) -> None:
    conductor = cluster.train("train.ranks=2", "train.steps=4", "engine.count=2", rollouts=1, lost=60.0)
    cluster.lend(cluster.a, "engine", "trainer", "rollout")
    cluster.lend(cluster.b, "engine", "trainer")
    assert conductor.wait(500) == 0, cluster.output()
    steps = lines(cluster.run, "step")
    assert [s["version"] for s in steps] == ["1.1", "1.2", "1.3", "1.4"]
    assert steps[0]["behaviour/abs_log_weight_max"] < 1e-3, "trainer and engines agree on the log-probs of version 0"
    assert lines(cluster.run, "publish")[-1]["version"] == "1.4"
    assert ledger(cluster.run)["steps"] == 4
    assert (cluster.run / "model" / "model.safetensors").stat().st_size > 0
    for worker in (*cluster.a.started, *cluster.b.started):
        assert worker.wait(120) == 0, cluster.output()


@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.skipif("AGENTRL_SGLANG_PYTHON" not in os.environ, reason="set AGENTRL_SGLANG_PYTHON")
def test_a_real_sglang_on_another_host(cluster: Cluster) -> None:
    python = os.environ["AGENTRL_SGLANG_PYTHON"]
    sglang = ("engine.kind=sglang", f"engine.python={python}", "engine.max_running=8")
    conductor = cluster.train(*sglang, "train.steps=2", "eval.every=1000", lost=60.0)
    cluster.lend(cluster.a, "engine")
    cluster.lend(cluster.b, "trainer")
    assert conductor.wait(800) == 0, cluster.output()
    steps = lines(cluster.run, "step")
    assert [s["version"] for s in steps] == ["1.1", "1.2"]
    assert steps[0]["behaviour/abs_log_weight_max"] < 1e-3, "trainer and SGLang agree on the log-probs of version 0"
    assert lines(cluster.run, "publish")[-1]["version"] == "1.2"
    assert ledger(cluster.run)["steps"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_imitation_with_a_rank_on_each_of_two_hosts(cluster: Cluster) -> None:
    talk = {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "abc"}]}
    (cluster.place / "talk.jsonl").write_text((json.dumps(talk) + "\n") * 40)
    (cluster.place / "sft.toml").write_text(SFT)
    conductor = cluster.conductor.start("conductor", "sft", "sft.toml", cwd=cluster.place)
    cluster.lend(cluster.a, "trainer")
    cluster.lend(cluster.b, "trainer")
    assert conductor.wait(500) == 0, cluster.output()
    run = cluster.place / "runs" / "s"
    assert [step["step"] for step in lines(run, "step")] == [1, 2, 3]
    assert len(list((run / "checkpoints").glob("step-*/state-*-of-00002.safetensors"))) == 2
    assert (run / "model" / "model.safetensors").stat().st_size > 0
