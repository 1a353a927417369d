"""A short soak: hundreds of steps leave memory and disk where they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "examples" / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gate_pool_and_runner_stay_small() -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), "--steps", "200", "--scripted"],
        capture_output=True,
        text=True,
        timeout=850,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # The benchmark's own bound is 5 % of a longer run; an allocator's odd megabyte weighs more here.
    assert found["controller_ratio"] < 1.10, found
    assert found["disk_mib"] < 1.3 * found["disk_mib_first_half"], found
