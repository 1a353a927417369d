"""The benchmarks whose smallest form takes seconds run, and end with one line of JSON that has their figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "concurrency": (["--episodes", "64", "--seconds", "1"], ()),
    "logprob_memory": (["--tokens", "256", "--vocabulary", "4096"], ("ratio",)),
    "packing": (
        ["--sequences", "16", "--budget", "2048", "--rounds", "1", "--layers", "1", "--hidden", "32"],
        ("ratio_vs_sorted", "ratio_vs_padded", "fill"),
    ),
    "pool": (["--groups", "20"], ()),
    "render_cost": ([], ("turn200_over_turn10", "turn200_ms")),
    "interrupt": (["--hidden", "64", "--layers", "2"], ()),
    "sandbox": (["--count", "20", "--without-docker"], ()),
    "scale": (["--only", "publish"], ("publish_64_over_8_engines",)),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_ends_with_its_figures(name: str) -> None:
    arguments, keys = SMALL[name]
    figures = json.loads(_last_line(name, arguments))
    assert isinstance(figures, dict)
    for key in keys:
        assert math.isfinite(figures[key]), figures
    assert any(isinstance(value, int | float) for value in figures.values()), figures


def _last_line(name: str, arguments: Sequence[str]) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "benchmarks" / f"{name}.py"), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
