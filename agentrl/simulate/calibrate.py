"""Costs and episodes from what a run measured itself: `metrics.jsonl`, `episodes.sqlite` and `config.toml`.

Engines: in each step's window, the seconds in which requests were in flight (publishes left out) are explained by
decode steps, sampled tokens and requests. Conductor: by how much other work slowed the trainer's fetches down.
Trainer: what remains of a step without waits, by packed tokens.
All by least squares with coefficients that are not negative. Episodes: as the newest that the run kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, NamedTuple

import numpy as np

from agentrl.conductor.config import RunConfig
from agentrl.conductor.folder import RunFolder
from agentrl.config import load
from agentrl.errors import ConfigError
from agentrl.monitor.archive import recent_bodies
from agentrl.monitor.metrics import read_metrics
from agentrl.rollout.schema import stored_bodies
from agentrl.simulate.cost import ConductorCost, EngineCost, Spread, TrainCost, Workload
from agentrl.types import Context, Episode, Group, Sampled
from agentrl.wire import decode_group

WARM_UP = 3
"""Steps at the beginning that tell of compilers and empty pools."""
LEAST = 6
"""Windows that are needed beyond them."""
GROUPS = 512
LEAST_FETCH = 2e-3
"""Seconds of the conductor that sending a group takes at least: shorter fetches met an idle one."""
LEAST_SHARE = 0.02
"""Of the time of a model call that is an engine's, however busy the conductor."""

Line = Mapping[str, Any]


class Measured(NamedTuple):
    """Means of a run's steps after the warm-up, to compare a simulation with."""

    step_seconds: float
    tokens_per_second: float
    engine_idle: float
    trainer_idle: float
    staleness_mean: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A run's costs."""

    engine: EngineCost
    train: TrainCost
    conductor: ConductorCost
    ranks: int
    work: Workload
    measured: Measured
    sources: tuple[str, ...]

    def trainer(self, ranks: int) -> TrainCost:
        """The costs of so many ranks: what grows with tokens is shared out."""
        share = self.ranks / ranks
        return replace(self.train, token=self.train.token * share, square=self.train.square * share)


def calibrate(path: Path) -> Calibration:
    """Read the run in `path`; ConfigError where it is none, or too short, or older than these metrics."""
    folder = RunFolder(path)
    if not folder.is_run:
        raise ConfigError(f"{path} holds no run (no config.toml)")
    config = load(RunConfig, folder.config)
    lines = [line for line in read_metrics(folder.metrics) if line["kind"] == "step"]
    publishes = [line for line in read_metrics(folder.metrics) if line["kind"] == "publish"]
    if len(lines) < WARM_UP + LEAST:
        raise ConfigError(f"{folder.metrics} has {len(lines)} steps, {WARM_UP + LEAST} are needed to calibrate with")
    if "engine/in_flight_mean" not in lines[-1]:
        raise ConfigError(f"{folder.metrics} has no engine/in_flight_mean: it was written by an older agentrl")
    windows = [_Window.of(a, b) for a, b in itertools.pairwise(lines[WARM_UP - 1 :])]
    stall = fmean(line["publish/stall_ms"] for line in publishes[1:] or publishes) / 1e3
    engine, told = _engine(windows, config, stall)
    train = _trainer(lines[WARM_UP:])
    loop = _conductor(lines[WARM_UP:], config)
    engine = engine.slower(max(1.0 - loop.share, LEAST_SHARE))
    conductor = loop.cost
    bodies = recent_bodies(path / "episodes.sqlite", GROUPS) or stored_bodies(folder.pool, GROUPS)
    if not bodies:
        raise ConfigError(f"{path} holds no episodes any more: keep them with monitor.keep_mb")
    groups = [decode_group(body) for body in bodies]
    work = workload(groups, _equal_share(lines))
    sources = (
        told,
        f"a training step: {train.fixed:.3f} s and {1e6 * train.token:.1f} µs a token, {train.hand_over:.3f} s to hand "
        "the weights over",
        f"the conductor: {1e3 * conductor.request:.2f} ms a model call, {1e3 * conductor.group:.2f} ms a group sent",
        f"{len(groups)} groups: {work.response.moments()[0]:.1f} sampled tokens a turn, "
        f"{work.turns.moments()[0]:.2f} turns, {work.prompt.moments()[0]:.0f} tokens of prompt, "
        f"{1e3 * work.tool.moments()[0]:.0f} ms of tools a turn, {100 * work.equal_share:.0f} % of groups filtered",
    )
    return Calibration(engine, train, conductor, config.train.ranks, work, _measured(lines), sources)


@dataclass(frozen=True, slots=True)
class _Window:
    """The time between two steps' ends."""

    seconds: float
    idle: float
    tokens: float
    requests: float
    in_flight: float

    @classmethod
    def of(cls, before: Line, after: Line) -> _Window:
        seconds = after["time"] - before["time"]
        return cls(
            seconds=seconds,
            idle=seconds * after["engine/idle_share"],
            tokens=seconds * after["rollout/tokens_per_second"],
            requests=seconds * after["engine/requests_per_second"],
            in_flight=after["engine/in_flight_mean"],
        )


def _engine(windows: Sequence[_Window], config: RunConfig, stall: float) -> tuple[EngineCost, str]:
    count, slots = config.engine.count, config.engine.max_running
    rows, seconds, batches = [], [], []
    for window in windows:
        busy = window.seconds - window.idle - stall
        if busy <= 0 or window.tokens <= 0:
            continue
        batch = min(slots, max(1.0, window.in_flight * window.seconds / (window.seconds - window.idle) / count))
        batches.append(batch)
        rows.append([window.tokens / count / batch, window.tokens / count, window.requests / count])
        seconds.append(busy)
    if not rows:
        raise ConfigError(
            "the engines of this run were never busy for longer than a publish: nothing to calibrate with"
        )
    step, sequence, request = _least_squares(rows, seconds)
    cost = EngineCost(step, sequence, request=request, slots=slots, load=stall, recompute=False)
    return cost, (
        f"an engine: {1e3 * step:.2f} ms a decode step, {1e3 * sequence:.3f} ms more a sequence, {1e3 * request:.2f} "
        f"ms a request, {stall:.2f} s a publish; seen with {min(batches):.0f} to {max(batches):.0f} requests at once"
    )


def _trainer(lines: Sequence[Line]) -> TrainCost:
    hand_over = fmean(line["seconds/weights"] for line in lines)
    rows = [[1.0, line["tokens/packed"]] for line in lines]
    waits = ("seconds/take", "seconds/fetch", "seconds/weights")
    seconds = [line["seconds/step"] - sum(line[wait] for wait in waits) for line in lines]
    fixed, token = _least_squares(rows, seconds)
    return TrainCost(fixed, token, hand_over=hand_over)


class _Loop(NamedTuple):
    """The conductor's event loop: its costs, and the share of requests in flight that wait for it, not for engines."""

    cost: ConductorCost
    share: float


def _conductor(lines: Sequence[Line], config: RunConfig) -> _Loop:
    """A fetch among n pieces of work takes 1 + n times as long: how long fetches take tells n.

    With n under way the loop is used n / (1 + n) of the time. Fetches of a synchronous run meet nothing else: it tells
    only their own cost.
    """
    fetch = fmean(line["seconds/fetch"] for line in lines) / config.rollout.groups_per_step
    if config.rollout.staleness == 0:
        return _Loop(ConductorCost(group=fetch), 0.0)
    in_flight = max(fmean(line["engine/in_flight_mean"] for line in lines), 1e-9)
    group = max(LEAST_FETCH, fetch / (1.0 + in_flight))
    waiting = max(0.0, fetch / group - 1.0)
    calls = fmean(line["engine/requests_per_second"] / max(1.0 - line["engine/idle_share"], 1e-9) for line in lines)
    return _Loop(ConductorCost(waiting / (1.0 + waiting) / max(calls, 1e-9), group), waiting / in_flight)


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients >= 0 of the few columns, the best of all choices of columns that are left in."""
    table, wanted = np.array(rows), np.array(values)
    columns = table.shape[1]
    best, error = np.zeros(columns), float("inf")
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            found = np.linalg.lstsq(table[:, chosen], wanted, rcond=None)[0]
            off = float(np.square(table[:, chosen] @ found - wanted).sum())
            if found.min() >= 0 and off < error * (1 - 1e-9):
                error, best = off, np.zeros(columns)
                best[list(chosen)] = found
    return tuple(float(value) for value in best)


def _equal_share(lines: Sequence[Line]) -> float:
    filtered = sum(line.get("rollout/groups_filtered", 0.0) for line in lines)
    whole = filtered + sum(line.get("rollout/groups_pooled", 0.0) for line in lines)
    return filtered / whole if whole else 0.0


def _measured(lines: Sequence[Line]) -> Measured:
    kept = lines[WARM_UP:]
    seconds = kept[-1]["time"] - lines[WARM_UP - 1]["time"]
    return Measured(
        step_seconds=seconds / len(kept),
        tokens_per_second=sum(line["tokens/trained"] for line in kept) / seconds,
        engine_idle=fmean(line["engine/idle_share"] for line in kept),
        trainer_idle=sum(line["seconds/take"] for line in kept) / seconds,
        staleness_mean=fmean(line["staleness/mean"] for line in kept),
    )


def workload(groups: Sequence[Group], equal_share: float) -> Workload:
    """What the episodes of these groups are made of."""
    episodes = [e for group in groups for e in group.episodes if e.trajectories]
    turns = [list(_turns(e)) for e in episodes]
    tools = [e.metrics.get("env_step_s", 0.0) / max(len(t), 1) for e, t in zip(episodes, turns, strict=True)]
    observations = [told for episode in turns for told, _ in episode[1:]]
    return Workload(
        response=Spread.measured([float(max(sampled, 1)) for episode in turns for _, sampled in episode]),
        prompt=Spread.measured([float(episode[0][0]) for episode in turns if episode]),
        turns=Spread.measured([float(max(len(episode), 1)) for episode in turns]),
        observation=Spread.measured([float(told) for told in observations]) if observations else Spread(0.0),
        tool=Spread.measured(tools),
        row_share=_row_share(groups),
        equal_share=equal_share,
    )


def _turns(episode: Episode) -> Iterator[tuple[int, int]]:
    """Of each turn: tokens that were new before it, and tokens that were sampled in it."""
    reached = [0] * len(episode.trajectories)
    for turn in episode.turns:
        if turn.trajectory is None:
            continue
        begin, reached[turn.trajectory] = reached[turn.trajectory], turn.end
        told = sampled = at = 0
        for segment in episode.trajectories[turn.trajectory].segments:
            inside = max(0, min(at + len(segment), turn.end) - max(at, begin))
            at += len(segment)
            told += inside if isinstance(segment.source, Context) else 0
            sampled += inside if isinstance(segment.source, Sampled) else 0
        yield told, sampled


def _row_share(groups: Sequence[Group]) -> float:
    """The share of the variance of logarithmic first answers that lies between groups."""
    firsts = [[log(max(next(_turns(e), (0, 1))[1], 1)) for e in g.episodes if e.trajectories] for g in groups]
    firsts = [group for group in firsts if len(group) > 1]
    whole = pvariance([value for group in firsts for value in group]) if firsts else 0.0
    if whole == 0.0:
        return 0.0
    inside = fmean(pvariance(group) * len(group) / (len(group) - 1) for group in firsts)
    return min(1.0, max(0.0, 1.0 - inside / whole))
