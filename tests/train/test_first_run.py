"""docs/tutorial_first.md, followed to the letter in an empty folder: its files, its commands, a model that learned."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.monitor.metrics import read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "tutorial_first.md"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_whoever_follows_the_page_has_a_model_that_learned(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for name, body in re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["brief.py", "run.toml", "vowels.py"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = ""
    for commands in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        done = subprocess.run(
            ["bash", "-euc", commands],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=2000,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        said += done.stdout
    assert "Vowels: 73 episodes played, 0 errors, 0 warnings" in said
    assert "finished after 2 turns, reward 1" in said
    assert "nothing was started" in said
    assert "vowels: finished" in said
    assert (tmp_path / "vowels.html").stat().st_size > 10_000
    assert (tmp_path / "runs" / "vowels" / "model" / "model.safetensors").exists()
    rewards = [
        line["eval/reward"] for line in read_metrics(tmp_path / "runs/vowels/metrics.jsonl") if line["kind"] == "eval"
    ]
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.7
    serve, judge = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert served_and_judged(serve, judge, tmp_path, path) > 0.7


def served_and_judged(serve: str, judge: str, folder: Path, path: str) -> float:
    """The reward that the command `judge` finds while `serve` serves, in a terminal of its own."""
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    serve = serve.replace("30000", "0")  # any free port
    with subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", *shlex.split(serve)[1:]],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            place = re.search(r"is served at (http://127\.0\.0\.1:\d+/v1)", server.stdout.readline())
            assert place is not None
            judge = judge.replace("http://127.0.0.1:30000/v1", place[1])
            done = subprocess.run(
                ["bash", "-euc", judge], cwd=folder, env=env, capture_output=True, text=True, timeout=900
            )
        finally:
            server.terminate()
    assert server.returncode == 0
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["eval/scored"] == 24
    return float(found["eval/reward"])
