"""Where the parts of a run stand, as plain numbers: state.json carries them, and /metrics is made of them."""

from __future__ import annotations

import time

from agentrl.cluster.launcher import EngineFleet
from agentrl.conductor.meter import MeteredEngine
from agentrl.conductor.supervise import Supervisor
from agentrl.endpoint.app import Endpoint
from agentrl.rollout.gate import Stage
from agentrl.rollout.runner import Runner

Gauges = dict[str, float]
ENGINE_FIGURES = {
    "running": "engine_running",
    "waiting": "engine_waiting",
    "decode_steps": "engine_decode_steps_total",
    "prefilled_tokens": "engine_prefilled_tokens_total",
    "cached_tokens": "engine_cached_tokens_total",
}
"""The embedded engine's counters and their names here. SGLang has a /metrics of its own, and far more in it."""


async def read_gauges(
    supervisor: Supervisor,
    step: int,
    endpoint: Endpoint | None,
    engine: MeteredEngine | None,
    runner: Runner | None,
    fleet: EngineFleet | None,
) -> Gauges:
    """All of them, of what is there already."""
    found = trainer_gauges(supervisor, step)
    if endpoint is not None and engine is not None and runner is not None:
        found |= rollout_gauges(endpoint, engine, runner)
    if fleet is not None:
        found |= await engine_gauges(fleet)
    return found


async def engine_gauges(fleet: EngineFleet) -> Gauges:
    """What the engines count themselves, added up over those that answer."""
    counters = await fleet.counters()
    found: Gauges = {"engine_answering": len(counters), "engine_fenced": len(fleet.router.fenced)}
    found["engine_deaths_total"] = fleet.deaths
    for name, told in ENGINE_FIGURES.items():
        values = [c[name] for c in counters if isinstance(c.get(name), int | float)]
        if values:
            found[told] = float(sum(values))
    return found


def trainer_gauges(supervisor: Supervisor, step: int) -> Gauges:
    """The trainer's step, its deaths, and how long ago its most silent rank spoke."""
    found: Gauges = {"trainer_step": step, "trainer_deaths_total": supervisor.deaths}
    beats = supervisor.group.beats if supervisor.group is not None else {}
    found["trainer_ranks"] = len(beats)
    if beats:
        found["trainer_silent_seconds"] = time.monotonic() - min(beat.heard for beat in beats.values())
    return found


def rollout_gauges(endpoint: Endpoint, engine: MeteredEngine, runner: Runner) -> Gauges:
    """Endpoint, engines, gate, pool and what became of episodes since the conductor started."""
    gate = runner.gate
    counts = {f"rollout_{name}_total": float(count) for name, count in runner.counts.items()}
    return {
        **counts,
        "endpoint_sessions": endpoint.open_sessions,
        "engine_requests_total": engine.requests,
        "engine_tokens_total": engine.tokens,
        "engine_requests_in_flight": engine.in_flight,
        "engine_idle_seconds_total": engine.idle_seconds,
        "gate_groups_live": gate.live,
        "gate_groups_limit": gate.limit,
        "gate_episodes_running": gate.episodes,
        "pool_groups": gate.count(Stage.POOLED),
        "pool_groups_taken": gate.count(Stage.TAKEN),
        "rollout_groups_running": gate.count(Stage.RUNNING),
        "rollout_retries_total": runner.player.retried,
        "rollout_version": runner.version.number,
        "sandbox_lost_total": runner.counts["stop_sandbox_lost"],
        **runner.player.sandboxes(),
    }
