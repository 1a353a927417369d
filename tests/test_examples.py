"""The configs and the script that users start from: valid here, whatever this machine has."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.conductor.check import resolve_agent, resolve_env
from agentrl.conductor.config import RunConfig, SftConfig
from agentrl.conductor.trainer import has_gpu
from agentrl.config import load

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.stem))
def test_every_config_is_valid(path: Path) -> None:
    if "sft" in tomllib.loads(path.read_text()):
        load(SftConfig, path)
        return
    config = load(RunConfig, path)
    resolve_env(config.env)
    resolve_agent(config.agent)


def test_a_config_whose_model_is_still_to_be_fetched_can_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "Tom has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", "--check", str(ROOT / "examples/qwen3_math.toml"), "data.train=rows.jsonl"]
    told = CliRunner().invoke(app, [*command, "data.eval=rows.jsonl"])
    assert told.exit_code == 0, told.output
    assert "1 training rows, 1 held-out" in told.output
    assert "not there yet" in told.output
    assert not Path("runs").exists()
    Path("rows.jsonl").write_text('{"answer": "7"}\n')
    told = CliRunner().invoke(app, [*command, "data.eval=rows.jsonl"])
    assert told.exit_code == 2
    assert "KeyError: 'question'" in told.output


def plan(tmp_path: Path, gpus: int, *arguments: str, sglang: bool = True, model: str = "") -> list[list[str]]:
    """The commands of run_async_ppo.sh on a machine with so many GPUs."""
    tools = tmp_path / "bin"
    tools.mkdir()
    listing = "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\\n" for i in range(gpus))
    # What the machine would answer: its driver's list, and an interpreter that can or cannot import sglang.
    for name, script in (("nvidia-smi", f"printf '{listing}'"), ("sglang-python", f"exit {0 if sglang else 1}")):
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "AGENTRL_SGLANG_PYTHON": str(tools / "sglang-python")}
    environment |= {"MODEL": model} if model else {}
    said = subprocess.run(
        ["bash", ROOT / "examples/run_async_ppo.sh", "--print", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    return [shlex.split(line[2:]) for line in said.stdout.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize(("gpus", "sglang"), [(0, True), (2, False)])
def test_the_script_runs_the_demo_where_gpus_or_sglang_are_missing(tmp_path: Path, gpus: int, sglang: bool) -> None:
    assert plan(tmp_path, gpus, sglang=sglang)[-1] == [".venv/bin/python", "examples/demo.py"]


@pytest.mark.parametrize(
    ("gpus", "engines", "ranks"), [(1, None, None), (2, [0], [1]), (8, [0, 1, 2, 3, 4, 5], [6, 7])]
)
def test_the_script_shares_gpus_out_in_favour_of_the_engines(
    tmp_path: Path, gpus: int, engines: list[int] | None, ranks: list[int] | None
) -> None:
    *_, download, train = plan(tmp_path, gpus, "train.steps=30", model="Some/Model-1.7B")
    assert download == [".venv/bin/hf", "download", "Some/Model-1.7B", "--local-dir", ".cache/models/Model-1.7B"]
    assert train[:3] == [".venv/bin/agentrl", "train", "examples/qwen3_math.toml"]
    config = load(RunConfig, ROOT / train[2], train[3:])
    assert config.engine.kind == "sglang"
    assert config.engine.count == len(engines or [0])
    assert config.train.ranks == len(ranks or [0])
    assert config.engine.gpus == (engines and tuple(engines))
    assert config.train.gpus == (ranks and tuple(ranks))
    assert config.engine.memory_fraction is not None
    assert config.model == Path(".cache/models/Model-1.7B")
    assert config.train.steps == 30


def test_the_script_takes_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    _install, train = plan(tmp_path, 1, model=str(tmp_path / "mine"))
    assert f"model={tmp_path / 'mine'}" in train


GPU_SCRIPT = [sys.executable, str(ROOT / "examples/benchmarks/gpu.py")]


@pytest.mark.skipif(has_gpu(), reason="there is a GPU: it would be measured")
def test_the_gpu_script_says_so_where_there_is_none() -> None:
    said = subprocess.run(GPU_SCRIPT, capture_output=True, text=True, timeout=110, check=True)
    assert json.loads(said.stdout.splitlines()[-1]) == {"gpu": False}


@pytest.mark.slow
def test_all_that_the_gpu_script_measures_runs_on_a_cpu_too() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(
        [*GPU_SCRIPT, "--toy"], capture_output=True, text=True, timeout=800, check=False, env=environment
    )
    told = json.loads(said.stdout.splitlines()[-1])
    assert said.returncode == 0, told
    keys = (
        "packed_over_padded",
        "mfu_packed",
        "logprob_memory_ratio",
        "publish_s",
        "decode_tokens_per_s",
        "async_over_sync",
    )
    assert all(told[key] > 0 for key in keys), told
