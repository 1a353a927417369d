"""Plays one sample of a row: makes environment, agent and session, and tries again after an infrastructure fault."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.errors import InfrastructureError, RequestRefused
from agentrl.rollout.episode import EpisodeSpec, Limits, Outcome, close_env, run_episode
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.session import MakeAgent, MakeEnv, OpenSession, SessionSpec
from agentrl.sandbox.census import Figures, census
from agentrl.types import Episode, Stop
from agentrl.wire import legible

INFRASTRUCTURE = frozenset({Stop.SANDBOX_LOST, Stop.ENGINE_LOST})
_MOST_WAIT = 10.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sample's session is opened. `name` is a prefix that no other process of the run uses."""

    name: str
    seed: int | None
    training: bool
    temperature: float


class Plays(Protocol):
    """Whoever plays episodes, in this process or another."""

    retried: int

    async def play(
        self, spec: EpisodeSpec, sampling: Sampling, *, on_act: Callable[[], None] = lambda: None
    ) -> Outcome:
        """One episode with its retries. `on_act` is called before any token of an action can be sampled."""
        ...

    def sandboxes(self) -> Figures:
        """What the sandboxes of episodes count, wherever they are (`sandbox/census.py`)."""
        ...


class Player:
    """Everything that is needed to play any row."""

    def __init__(
        self, options: RolloutOptions, *, make_env: MakeEnv, make_agent: MakeAgent, open_session: OpenSession
    ) -> None:
        self._options = options
        self._make_env = make_env
        self._make_agent = make_agent
        self._open_session = open_session
        self._count = itertools.count()
        self.retried = 0

    def sandboxes(self) -> Figures:
        """Those of this process."""
        return census().figures()

    async def play(
        self, spec: EpisodeSpec, sampling: Sampling, *, on_act: Callable[[], None] = lambda: None
    ) -> Outcome:
        """One episode with its retries: same row and seeds each time, waits doubling from half a second."""
        tried = 0
        while True:
            outcome = await self._try(spec, sampling, on_act)
            final = isinstance(outcome.error, RequestRefused) or outcome.episode.stop not in INFRASTRUCTURE
            if final or tried >= self._options.retries:
                return replace(
                    outcome,
                    episode=replace(outcome.episode, metrics={**outcome.episode.metrics, "retries": float(tried)}),
                )
            self.retried += 1
            await asyncio.sleep(min(0.5 * 2**tried, _MOST_WAIT))
            tried += 1

    async def _try(self, spec: EpisodeSpec, sampling: Sampling, on_act: Callable[[], None]) -> Outcome:
        options = self._options
        deadline = asyncio.get_running_loop().time() + options.time_limit
        try:
            # A row of its own: what one environment does to it, its siblings must not see.
            env = self._make_env(copy.deepcopy(spec.row))
        except Exception as error:
            stop = Stop.SANDBOX_LOST if isinstance(error, InfrastructureError) else Stop.ENV_ERROR
            return Outcome(
                unplayed(spec, stop, f"making the environment raised {type(error).__name__}: {error}"), error
            )
        session_id = f"{sampling.name}.{spec.group}.{spec.attempt}.{spec.sample}.{next(self._count)}"
        try:
            session = self._open_session(
                SessionSpec(
                    session_id, sampling.seed, sampling.training, sampling.temperature, options.max_tokens, deadline
                )
            )
        except InfrastructureError as error:
            await close_env(env, options.close_seconds)
            return Outcome(unplayed(spec, Stop.ENGINE_LOST, f"opening a session failed: {error}"), error)
        limits = Limits(options.max_turns, deadline, options.close_seconds)
        return await run_episode(env, self._make_agent, session, spec, limits, on_act=on_act)


def unplayed(spec: EpisodeSpec, stop: Stop, error: str) -> Episode:
    """The record of an episode of which nothing is left."""
    return Episode(
        group=spec.group,
        sample=spec.sample,
        attempt=spec.attempt,
        seed=spec.seed,
        row=spec.row,
        messages=(),
        turns=(),
        trajectories=(),
        stop=stop,
        error=legible(error),
    )
