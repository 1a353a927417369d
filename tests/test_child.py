"""Children end with their parent, and stops reach grandchildren."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.child import Child, gpu_environment
from agentrl.errors import ConfigError

SLEEPER = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _pid_in(log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.exists() and (text := log.read_text().strip()):
            return int(text.split()[0])
        time.sleep(0.02)
    raise AssertionError(f"nothing written to {log}")


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _alive(pid):
        time.sleep(0.02)
    return not _alive(pid)


async def test_exit_code_and_log(tmp_path: Path) -> None:
    child = Child("c", [sys.executable, "-c", "print('last words'); raise SystemExit(3)"], log=tmp_path / "c.log")
    assert await asyncio.wait_for(child.wait(), 60) == 3
    assert child.tail() == "last words"
    child.kill()


async def test_stop_reaches_grandchildren(tmp_path: Path) -> None:
    child = Child("c", [sys.executable, "-c", SLEEPER], log=tmp_path / "c.log")
    grandchild = await asyncio.to_thread(_pid_in, tmp_path / "c.log")
    assert _alive(grandchild)
    await child.stop(grace=0.2)
    assert await asyncio.to_thread(_gone, grandchild)


async def test_stop_ends_one_that_ignores_term(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = Child("c", [sys.executable, "-c", code], log=tmp_path / "c.log")
    await asyncio.to_thread(_pid_in, tmp_path / "c.log")
    assert await asyncio.wait_for(child.stop(grace=0.2), 60) != 0


def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "c.log"
    parent_code = (
        "import sys, time; from pathlib import Path; from agentrl.child import Child\n"
        f"Child('c', [sys.executable, '-c', {SLEEPER!r}], log=Path({str(log)!r})); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code])
    grandchild = _pid_in(log)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert _gone(grandchild)


def test_gpus_are_numbered_within_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_environment(None) == {}
    assert gpu_environment((2, 3)) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7,6")
    assert gpu_environment((0, 1)) == {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}
    with pytest.raises(ConfigError, match="there is no GPU 3"):
        gpu_environment((3,))
