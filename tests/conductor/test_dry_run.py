"""`agentrl train --dry-run` on set-ups that work and on broken ones: every fault is named, nothing is started."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli import app
from agentrl.conductor import estimate
from agentrl.conductor.config import RunConfig
from agentrl.conductor.knobs import refuse_dead_knobs
from agentrl.conductor.rehearsal import _spread, sample
from agentrl.errors import ConfigError
from tests.conductor.kit import finished, make_place, start

BOXED = """
from agentrl.env import Env
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.pool import open_sandbox
from agentrl.types import Step

class Boxed(Env):
    @classmethod
    def rows(cls, split, seed):
        return [{"n": n} for n in range(4)]
    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": "go"}], {}
    async def step(self, action):
        options = SandboxOptions(kind="docker", slots=1, docker_url="unix:///nowhere/docker.sock")
        async with open_sandbox(options) as pool, pool.box() as box:
            await box.exec(["python3", "-c", "print(1)"])
        return Step([], 1.0, True, False, {})
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make_place(tmp_path)


def dry(*overrides: str) -> Result:
    return CliRunner().invoke(app, ["train", "run.toml", "--dry-run", *overrides])


def failed(result: Result, check: str, *texts: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = result.output.splitlines()
    assert any(line.startswith("FAILED") and check in line for line in lines), result.output
    flat = " ".join(result.output.split())
    for text in (*texts, f"failed: {check}", "Nothing was started"):
        assert text in flat, result.output
    assert not Path("runs").exists()
    assert "first step" not in result.output, "the long check waits until the others are mended"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sound_run_is_played_stepped_and_planned(place: Path) -> None:
    code, output = finished(start(place, "train", "run.toml", "--dry-run"), 300)
    assert code == 0, output
    flat = " ".join(output.split())
    for text in (
        "ok settings",
        "all training rows start an episode",
        "ok episode with scripted answers one ended max_tokens",
        "ok first step the trainer, on the CPU, one rank",
        "made-up rewards 0 and 1, loss",
        "1 × engine embedded",
        "ZeRO-0 330 kB",
        "2 groups × 2 episodes = 4 episodes",
        "at most 10 groups live",
        "expected staleness",
        "nothing was started",
    ):
        assert text in flat, output
    norm = float(flat.partition("gradient norm ")[2].partition(",")[0])
    assert norm > 1e-6, "the made-up rewards make a gradient"
    assert not (place / "runs").exists()


def test_wrong_template(place: Path) -> None:
    template = place / "model" / "chat_template.jinja"
    # No token ends a turn, so nothing can be put after one.
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    failed(dry(), "model", "this chat template cannot be continued exactly", 'endpoint.unproven_template = "turn"')


def test_taken_port(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failed(dry(f"endpoint.port={port}"), "ports", f"endpoint.port = {port}: Address already in use", "or 0 for any")


def test_run_folder_that_cannot_be_written(place: Path) -> None:
    (place / "file").write_text("")
    failed(dry("run_dir=file/runs"), "run folder", "is a file, not a folder", "set run_dir")
    locked = place / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    # Root may write anywhere but into the kernel's own file systems.
    folder = "/proc" if os.geteuid() == 0 else str(locked)
    failed(dry(f"run_dir={folder}"), "run folder", "nothing can be written in", "set run_dir")
    (place / "old" / "r").mkdir(parents=True)
    (place / "old" / "r" / "config.toml").write_text("")
    failed(dry("run_dir=old"), "run folder", "already holds a run: continue it with --resume")


def test_misspelt_key(place: Path) -> None:
    result = dry("rollout.stalenes=2")
    assert result.exit_code == 2
    assert "unknown key 'stalenes'; did you mean 'staleness'?" in " ".join(result.output.split())


def test_no_docker(place: Path) -> None:
    (place / "env.py").write_text(BOXED)
    failed(dry("env.path=env.py:Boxed"), "episode", "no engine answers at unix:///nowhere/docker.sock", "start it")


def test_no_sglang(place: Path) -> None:
    failed(dry("engine.kind=sglang", "engine.python=nowhere/python"), "engine", "nowhere/python is no interpreter")
    bare = place / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -E "$@"\n')
    bare.chmod(0o755)
    failed(dry("engine.kind=sglang", f"engine.python={bare}"), "engine", f"not in {bare}", "examples/sglang_cpu")


def test_an_environment_that_breaks_and_a_row_that_does(place: Path) -> None:
    failed(dry("env.args.fault=step"), "episode", "ended with env_error", "RuntimeError: the simulator broke")
    rows = [{"word": "a"}] * 9 + [{"wort": "b"}] + [{"word": "c"}] * 3
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    failed(dry("data.train=rows.jsonl"), "rows", "training row 10 of 13 raised KeyError: 'word'")


def test_several_faults_are_told_at_once(place: Path) -> None:
    result = dry(
        "model=nowhere", "data.train=none.jsonl", "run_dir=env.py", "data.eval=x", "eval.every=0", "eval.rows=3"
    )
    assert "eval.rows has no effect" in " ".join(result.output.split())
    result = dry("model=nowhere", "data.train=none.jsonl", "run_dir=env.py", "train.collective_timeout=5")
    assert result.exit_code == 2
    assert "failed: settings, run folder, model, data" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["eval={every=0}", "data.eval=env.py"], "data.eval has no effect with eval.every = 0"),
        (["rollout.max_filtered=3"], "rollout.max_filtered has no effect: no group is filtered"),
        (
            ["rollout.staleness=0", "rollout.when_stale=drop"],
            "rollout.when_stale has no effect with rollout.staleness = 0",
        ),
        (["train.collective_timeout=9"], "train.collective_timeout has no effect with train.ranks = 1"),
        (["train.checkpoint_every=0", "train.keep_checkpoints=3"], "train.keep_checkpoints has no effect"),
        (["cluster.rollout_workers=1", "endpoint.port=8000"], "endpoint.port has no effect with cluster.rollout_wo"),
        (["env=[{path='env.py:Bright', weight=2}]"], "env.weight has no effect with one [[env]]"),
        (
            ["engine.kind=sglang", "engine.device=cpu", "engine.memory_fraction=0.4"],
            "engine.memory_fraction has no effect",
        ),
    ],
)
def test_dead_knobs_are_refused_in_a_dry_run_and_in_a_run(place: Path, overrides: Sequence[str], text: str) -> None:
    failed(dry(*overrides), "settings", text)
    result = CliRunner().invoke(app, ["train", "run.toml", *overrides])
    assert result.exit_code == 2, result.output
    assert " ".join(result.output.split()).startswith(f"error: {text}"), result.output
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.collective_timeout=9", "train.collective_timeout has no effect with train.ranks = 1"),
        ("monitor.engine_restarts=1", "monitor.engine_restarts has no effect: no engine"),
    ],
)
def test_dead_knobs_are_refused_by_imitation_too(place: Path, override: str, text: str) -> None:
    (place / "sft.toml").write_text('name = "s"\nmodel = "model"\nsft.data = "x.jsonl"\n')
    result = CliRunner().invoke(app, ["sft", "sft.toml", override])
    assert result.exit_code == 2, result.output
    assert f"error: {text}" in " ".join(result.output.split())
    assert not Path("runs").exists()


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "x", "model": "m", "env": {"path": "a:B"}, **sections})


@pytest.mark.parametrize(
    ("sections", "gpus", "text"),
    [
        ({"train": {"gpus": [0]}}, 0, "train.gpus has no effect with no GPU on this machine"),
        ({"train": {"offload_optimizer": True}}, 0, "train.offload_optimizer has no effect with no GPU"),
        ({"train": {"gpus": [0, 1], "ranks": 2}}, 1, "train.gpus names GPU 1, and this machine has 1"),
        ({"engine": {"kind": "sglang", "gpus": [4]}}, 4, "engine.gpus names GPU 4, and this machine has 4"),
        ({"engine": {"kind": "sglang", "device": "cuda"}}, 0, "engine.device = 'cuda', and this machine has no GPU"),
        ({"engine": {"kind": "sglang", "memory_fraction": 0.5}}, 0, "engine.memory_fraction has no effect"),
    ],
)
def test_gpus_that_are_not_there(sections: dict[str, Any], gpus: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        refuse_dead_knobs(config(**sections), gpus=gpus)
    refuse_dead_knobs(config(**sections), gpus=8)
    refuse_dead_knobs(config(**sections))  # for another machine


def test_threads_of_ranks_have_an_effect_without_gpus_alone() -> None:
    sections: dict[str, Any] = {"train": {"threads": 2}}
    refuse_dead_knobs(config(**sections), gpus=0)
    with pytest.raises(ConfigError, match=r"train\.threads has no effect on a GPU"):
        refuse_dead_knobs(config(**sections), gpus=1)


MODEL = estimate.ModelSize(parameters=7_500_000_000, layers=32, hidden=4096, intermediate=11_008, kv_width=4096)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_memory_by_zero_stage_is_that_of_the_paper(stage: int, gigabytes: float) -> None:
    # Rajbhandari et al. 2020, figure 1: Ψ = 7.5B, 64 ranks, mixed precision.
    assert estimate.trainer_bytes(MODEL, stage, 64, "bf16") / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_the_size_of_a_model_is_read_from_its_files(place: Path) -> None:
    model = estimate.model_size(place / "model")
    assert model.parameters * 4 == pytest.approx((place / "model" / "model.safetensors").stat().st_size, rel=0.05)
    assert (model.layers, model.hidden, model.intermediate) == (1, 32, 32)


def test_pace() -> None:
    free = estimate.pace(config(rollout={"groups_per_step": 4, "samples": 2, "staleness": 3}))
    assert (free.groups_live, free.groups_running, free.episodes_running, free.capped) == (16, 16, 32, False)
    assert (free.least, free.most) == (3.0, 3)
    capped = estimate.pace(config(rollout={"groups_per_step": 4, "samples": 2, "staleness": 3, "concurrency": 17}))
    assert (capped.groups_running, capped.episodes_running, capped.capped, capped.least) == (8, 16, True, 1.0)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 100])
def test_rows_are_tried_all_over_first_and_all_in_the_end(n: int) -> None:
    order = _spread(n)
    assert sorted(order) == list(range(n))
    early = sorted(order[: max(1, n // 4)])
    assert n < 8 or max(b - a for a, b in zip(early, [*early[1:], n], strict=True)) <= 8


def test_sample_arguments() -> None:
    schema = {
        "type": "object",
        "required": ["a", "b", "c", "d"],
        "properties": {
            "a": {"type": "integer"},
            "b": {"enum": ["x", "y"]},
            "c": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "d": {"type": "array", "items": {}},
            "e": {"type": "string"},
        },
    }
    assert sample(schema) == {"a": 1, "b": "x", "c": True, "d": []}
