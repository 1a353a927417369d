"""What the conductor measures itself: requests and tokens on their way to the engines, and what became of episodes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from agentrl.engine.types import Completion, Engine, GenerateRequest, OnTokens
from agentrl.types import Group


class MeteredEngine:
    """An engine that counts what passes through it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens = 0
        self.requests = 0
        self.in_flight = 0
        self._request_seconds = 0.0
        self._counted_at = time.monotonic()
        self._idle_since: float | None = time.monotonic()
        self._idle = 0.0
        self._ready_at: float | None = None
        self._next_request = asyncio.Event()

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See `Engine.generate`."""
        self._begin()
        try:
            completion = await self._engine.generate(request, on_tokens)
            self.tokens += int(completion.tokens.size)
            return completion
        finally:
            self._count()
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle_since = time.monotonic()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """An episode that another process plays: while it runs, the engines are not idle."""
        self._begin()
        try:
            yield
        finally:
            self._count()
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle_since = time.monotonic()

    def _begin(self) -> None:
        self._count()
        self.requests += 1
        self.in_flight += 1
        if self._idle_since is not None:
            self._idle += time.monotonic() - self._idle_since
            self._idle_since = None
        self._next_request.set()

    def _count(self) -> None:
        now = time.monotonic()
        self._request_seconds += self.in_flight * (now - self._counted_at)
        self._counted_at = now

    @property
    def request_seconds(self) -> float:
        """Seconds that all requests together were in flight, since the start; over the time it is their mean number."""
        self._count()
        return self._request_seconds

    @property
    def idle_seconds(self) -> float:
        """Seconds without any request in flight, since the start."""
        return self._idle + (0.0 if self._idle_since is None else time.monotonic() - self._idle_since)

    async def resumed(self, timeout: float = 10.0) -> float | None:
        """Seconds from now until the engines have work: 0 where requests are in flight, None after `timeout`."""
        if self.in_flight:
            return 0.0
        begin = time.monotonic()
        self._next_request.clear()
        try:
            await asyncio.wait_for(self._next_request.wait(), timeout)
        except TimeoutError:
            return None
        return time.monotonic() - begin


@dataclass
class EnvWindow:
    """Of one environment: a mean a group, since the episodes of a group resemble each other."""

    episodes: int = 0
    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)

    def group(self, group: Group) -> None:
        """Note its scored episodes."""
        scored = [e for e in group.episodes if e.reward is not None]
        if not scored:
            return
        self.episodes += len(scored)
        self.rewards.append(fmean(e.reward or 0.0 for e in scored))
        self.lengths.append(fmean(sum(int(t.loss_mask.sum()) for t in e.trajectories) for e in scored))
        self.turns.append(fmean(len({turn.index for turn in e.turns}) for e in scored))

    def figures(self) -> dict[str, float]:
        """Means over groups and their standard errors (None: one group says nothing of its own error)."""
        found: dict[str, Any] = {"episodes": self.episodes, "groups": len(self.rewards)}
        for name, values in (("reward", self.rewards), ("length", self.lengths), ("turns", self.turns)):
            found[name] = fmean(values)
            found[f"{name}_error"] = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        return found


@dataclass
class Window:
    """What finished since the last step's metrics."""

    since: float = field(default_factory=time.monotonic)
    tokens: int = 0
    idle: float = 0.0
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    several_versions: int = 0
    episodes: int = 0
    envs: dict[str, EnvWindow] = field(default_factory=dict)


class RolloutMeter:
    """Collects groups as they finish; `drain` gives the figures of the time since it was last asked."""

    def __init__(self, engine: MeteredEngine) -> None:
        self._engine = engine
        self._window = Window()
        self._start = (0, 0.0, 0, 0.0)

    def group(self, group: Group, fate: str) -> None:
        """A group finished, whatever became of it."""
        window = self._window
        window.fates[fate] += 1
        window.envs.setdefault(group.env, EnvWindow()).group(group)
        for episode in group.episodes:
            window.stops[episode.stop.value] += 1
            if episode.reward is None:
                continue
            window.rewards.append(episode.reward)
            window.turns.append(len({turn.index for turn in episode.turns}))
            window.episodes += 1
            versions = {v for t in episode.trajectories for v in t.sampled_versions}
            window.several_versions += len(versions) > 1

    def drain(self) -> dict[str, Any]:
        """The window's metrics; a new window begins."""
        window, self._window = self._window, Window()
        seconds = max(time.monotonic() - window.since, 1e-6)
        tokens, idle = self._engine.tokens, self._engine.idle_seconds
        requests, in_flight = self._engine.requests, self._engine.request_seconds
        found: dict[str, Any] = {
            "rollout/tokens_per_second": (tokens - self._start[0]) / seconds,
            "engine/idle_share": min(1.0, (idle - self._start[1]) / seconds),
            "engine/requests_per_second": (requests - self._start[2]) / seconds,
            "engine/in_flight_mean": (in_flight - self._start[3]) / seconds,
            **{f"rollout/groups_{fate}": float(n) for fate, n in sorted(window.fates.items())},
            **{f"rollout/stop_{stop}": float(n) for stop, n in sorted(window.stops.items())},
        }
        self._start = (tokens, idle, requests, in_flight)
        if window.episodes:
            found["reward/mean"] = sum(window.rewards) / window.episodes
            found["rollout/turns_mean"] = sum(window.turns) / window.episodes
            found["rollout/several_versions_share"] = window.several_versions / window.episodes
        found["envs"] = {name: env.figures() for name, env in sorted(window.envs.items()) if env.rewards}
        return found
