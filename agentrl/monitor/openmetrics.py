"""`/metrics`: where a run stands, in the text form that Prometheus and its kin scrape.

Source of the form: the OpenMetrics specification, version 1.0.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
HELP = {
    "endpoint_sessions": "Open sessions of the endpoint.",
    "engine_requests": "Generate requests sent to the engines.",
    "engine_tokens": "Tokens that the engines sampled.",
    "engine_requests_in_flight": "Generate requests that the engines work on.",
    "engine_idle_seconds": "Time without any request in flight.",
    "engine_answering": "Engines that answer.",
    "engine_fenced": "Engines that serve nothing at present.",
    "engine_deaths": "How often an engine was started again.",
    "engine_running": "Requests that the engines decode.",
    "engine_waiting": "Requests that wait within the engines.",
    "engine_decode_steps": "Decoding steps.",
    "engine_prefilled_tokens": "Tokens that were prefilled.",
    "engine_cached_tokens": "Prompt tokens whose keys and values were there already.",
    "gate_groups_live": "Groups that count against the gate's limit.",
    "gate_groups_limit": "The gate's limit, (staleness + 1) batches.",
    "gate_episodes_running": "Episodes that run.",
    "pool_groups": "Finished groups that wait for the trainer.",
    "pool_groups_taken": "Groups with the trainer.",
    "rollout_version": "The number of the weights that the engines serve.",
    "sandbox_lost": "Episodes that ended because their sandbox was lost.",
    "trainer_step": "The last finished step.",
    "trainer_ranks": "Ranks that have said they are alive.",
    "trainer_silent_seconds": "Since the most silent rank was heard.",
    "trainer_deaths": "How often the trainer was started again.",
}


def exposition(state: Mapping[str, Any], last: Mapping[str, float], alive: bool) -> str:
    """The metrics of a run: gauges and counters of state.json while it lives, and the figures of its last step."""
    lines = []
    gauges = state.get("gauges") if alive else None
    for name, value in sorted(gauges.items() if isinstance(gauges, dict) else ()):
        counter = name.endswith("_total")
        lines += _metric(name.removesuffix("_total"), value, counter)
    lines += _metric("up", float(alive), False, "Whether the run's conductor lives.")
    seen = set()
    for name, value in sorted(last.items()):
        clean = "step_" + re.sub(r"\W", "_", name)
        if name.startswith("envs/") or clean in seen:
            continue
        seen.add(clean)
        lines += _metric(clean, value, False, f"{name} of the last finished step.")
    for name, value in sorted(last.items()):
        if name.startswith("envs/"):
            lines += _labelled(name, value, seen)
    return "\n".join([*lines, "# EOF", ""])


def _metric(name: str, value: object, counter: bool, help_text: str = "") -> list[str]:
    if not isinstance(value, int | float):
        return []
    family, kind = f"agentrl_{name}", "counter" if counter else "gauge"
    told = help_text or HELP.get(name, "")
    helped = [f"# HELP {family} {_escaped(told)}"] if told else []
    unit = [f"# UNIT {family} seconds"] if family.endswith("_seconds") else []
    return [f"# TYPE {family} {kind}", *unit, *helped, f"{family}{'_total' if counter else ''} {_number(value)}"]


def _labelled(name: str, value: float, seen: set[str]) -> list[str]:
    env, _, figure = name.removeprefix("envs/").rpartition("/")
    family = f"agentrl_env_{re.sub(r'[^0-9A-Za-z_]', '_', figure)}"
    head = [] if family in seen else [f"# TYPE {family} gauge"]
    seen.add(family)
    return [*head, f'{family}{{env="{_escaped(env)}"}} {_number(value)}']


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return (
        repr(float(value)) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    )
