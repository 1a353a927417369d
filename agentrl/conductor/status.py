"""`agentrl status`: a run seen from outside, by what it writes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from agentrl.conductor.folder import RunFolder
from agentrl.conductor.page import page_file
from agentrl.errors import ConfigError
from agentrl.monitor.live import summary
from agentrl.monitor.metrics import read_metrics


def describe(path: Path) -> str:
    """What the run in `path` is doing, as text; ConfigError where there is none."""
    folder = RunFolder(path)
    if not folder.is_run:
        raise ConfigError(f"{path} is no run's folder: it has no config.toml")
    state = _state(folder.state)
    alive = folder.locked
    lines = [f"{folder.path.name}: {_phase(state, alive)}"]
    last: dict[str, dict[str, Any]] = {}
    for line in read_metrics(folder.metrics):
        last[str(line["kind"])] = line
    if step := last.get("step"):
        figures = "  ".join(f"{key} {value}" for key, value in summary(step))
        lines.append(f"step {step['step']}/{state.get('steps', '?')}, {_ago(step['time'])} ago: {figures}")
    if evaluation := last.get("eval"):
        figures = "  ".join(f"{key} {value}" for key, value in summary(evaluation))
        lines.append(f"evaluation at step {evaluation['step']}: {figures}")
    if alive and page_file(folder.path).exists():
        lines.append(f"page: {page_file(folder.path).read_text().strip()}")
    for key in ("published", "gate", "pool", "engines", "trainer"):
        if key in state:
            lines.append(f"{key}: {state[key]}")
    if alive and state.get("waits"):
        lines += ["waits, longest first:", *(f"  {wait}" for wait in state["waits"])]
    if state.get("error"):
        lines += ["ended with:", str(state["error"])]
    return "\n".join(lines)


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return state if isinstance(state, dict) else {}


def _phase(state: dict[str, Any], alive: bool) -> str:
    phase = str(state.get("phase", "starting"))
    if alive:
        return f"{phase} (said {_ago(state['time'])} ago)" if "time" in state else phase
    if phase in ("finished", "failed", "stopped"):
        return phase
    return f"died while {phase}: continue with agentrl train RUN.TOML --resume"


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
