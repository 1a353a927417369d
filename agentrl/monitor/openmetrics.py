"""`/metrics`: where a run stands, in the text form that Prometheus and its kin scrape.

Source of the form: the OpenMetrics specification, version 1.0.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "")
_LE = re.compile(r',?le="([^"]*)"')
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
    "sandbox_boxes": "Boxes by what they do.",
    "sandbox_slots": "Boxes that the open pools may have at once.",
    "sandbox_waiting": "Users in the line for a box.",
    "sandbox_starts": "Boxes that were started.",
    "sandbox_start_failures": "Boxes that could not be started.",
    "sandbox_boxes_lost": "Boxes that were gone before their user was done.",
    "sandbox_boxes_replaced": "Boxes that were not fit for another user: lost, at a limit, not to be cleaned.",
    "sandbox_wait_seconds": "From asking for a box to having it.",
    "sandbox_programs": "Programs that were run in boxes, by how they ended.",
    "sandbox_program_seconds": "From asking for a program to run to its result.",
    "trainer_step": "The last finished step.",
    "trainer_ranks": "Ranks that have said they are alive.",
    "trainer_silent_seconds": "Since the most silent rank was heard.",
    "trainer_deaths": "How often the trainer was started again.",
}


class Sample(NamedTuple):
    """One line of a family: `suffix` is what follows the family's name."""

    suffix: str
    labels: str
    value: float


def exposition(state: Mapping[str, Any], last: Mapping[str, float], alive: bool) -> str:
    """The metrics of a run: gauges and counters of state.json while it lives, and the figures of its last step."""
    lines = []
    gauges = state.get("gauges") if alive else None
    for name, samples in sorted(_families(gauges if isinstance(gauges, dict) else {}).items()):
        lines += _family(name, samples)
    lines += _family("up", [Sample("", "", float(alive))], "Whether the run's conductor lives.")
    seen = set()
    for name, value in sorted(last.items()):
        clean = "step_" + re.sub(r"\W", "_", name)
        if name.startswith("envs/") or clean in seen:
            continue
        seen.add(clean)
        lines += _family(clean, [Sample("", "", value)], f"{name} of the last finished step.")
    for name, value in sorted(last.items()):
        if name.startswith("envs/"):
            lines += _labelled(name, value, seen)
    return "\n".join([*lines, "# EOF", ""])


def _families(gauges: Mapping[str, object]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for key, value in gauges.items():
        name, brace, labels = key.partition("{")
        if not isinstance(value, int | float):
            continue
        suffix = next((end for end in _SUFFIXES if name.endswith(end)), "")
        found.setdefault(name.removesuffix(suffix), []).append(Sample(suffix, brace + labels, value))
    return found


def _family(name: str, samples: Sequence[Sample], help_text: str = "") -> list[str]:
    family = f"agentrl_{name}"
    told = help_text or HELP.get(name, "")
    helped = [f"# HELP {family} {_escaped(told)}"] if told else []
    unit = [f"# UNIT {family} seconds"] if family.endswith("_seconds") else []
    # The samples of a histogram stand together for each set of labels, its buckets in ascending order.
    ordered = sorted(samples, key=lambda s: (_LE.sub("", s.labels), _SUFFIXES.index(s.suffix), _bound(s.labels)))
    lines = [f"{family}{s.suffix}{s.labels} {_number(s.value)}" for s in ordered]
    return [f"# TYPE {family} {_kind({s.suffix for s in samples})}", *unit, *helped, *lines]


def _kind(suffixes: set[str]) -> str:
    if "_total" in suffixes:
        return "counter"
    if "_bucket" in suffixes:
        return "histogram"
    return "summary" if "_sum" in suffixes else "gauge"


def _bound(labels: str) -> float:
    found = _LE.search(labels)
    return float(found[1]) if found else 0.0


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
