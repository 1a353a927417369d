"""THE loop: one environment, one agent, one session, from reset to a typed end.

A bad episode is data, not a crash: whatever escapes is attributed to the side that raised it and to what kind of error
it is. Only cancellation passes, and a broken session of our own.
"""

from __future__ import annotations

import asyncio
import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.agent import Agent
from agentrl.calling import Caller
from agentrl.contract import checked_action, checked_parts, checked_reset, checked_step
from agentrl.env import Env
from agentrl.errors import AgentRLError, DeadlineExceeded, EngineError, InfrastructureError, LimitReached, SandboxLost
from agentrl.rollout.session import MakeAgent, Session, agent_of
from agentrl.rollout.shares import checked_shares, share_out
from agentrl.types import Episode, Message, Row, Sampled, Stop, Trajectory, Turn
from agentrl.wire import legible


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Which episode is played: its place in the run, its row, its environment's seed."""

    group: int
    sample: int
    attempt: int
    seed: int
    row: Row


@dataclass(frozen=True, slots=True)
class Limits:
    """`deadline` is absolute, in `loop.time()` seconds; the token limit is kept by the session."""

    max_turns: int
    deadline: float
    close_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """An episode, and the exception that ended it, for those who must chain it."""

    episode: Episode
    error: Exception | None = None


@dataclass(slots=True)
class _Play:
    """What the loop knows so far."""

    side: str = "env.reset"
    acted: bool = False
    """Whether an action was made that no step has answered."""
    messages: list[Message] = field(default_factory=list)
    marks: tuple[tuple[int, int], ...] = ()
    turns: list[Turn] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    index: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    caller: Caller = field(default_factory=Caller)


async def run_episode(
    env: Env,
    make_agent: MakeAgent,
    session: Session,
    spec: EpisodeSpec,
    limits: Limits,
    *,
    on_act: Callable[[], None] = lambda: None,
) -> Outcome:
    """Play one episode. `on_act` is called before each action, so before any token of it can be sampled.

    `env.close` and `session.close` are called exactly once, also on cancellation.
    """
    play = _Play()
    loop = asyncio.get_running_loop()
    began = loop.time()
    error: Exception | None = None
    clock = asyncio.timeout_at(limits.deadline)
    notes: list[str] = []
    trajectories: tuple[Trajectory, ...] = ()
    try:
        async with clock:
            stop = await _loop(env, make_agent, session, spec, limits, play, on_act)
    except Exception as raised:
        error = raised
        # The session keeps the same deadline and may notice it first.
        late = isinstance(raised, DeadlineExceeded | LimitReached) and loop.time() >= limits.deadline
        stop = Stop.TIME_LIMIT if late or clock.expired() else _attribute(raised, play.side, session.failure)
    finally:
        # Each whatever the other does: a cancelled episode releases both too.
        try:
            notes += await close_env(env, limits.close_seconds, play.caller)
        finally:
            trajectories, lost = await _close_session(session, limits.close_seconds)
    notes += lost
    if lost and stop.scored:
        stop = Stop.ENGINE_LOST
    stop = _finish_turns(play, trajectories, stop)
    metrics = {**session.metrics, **play.seconds, "seconds": loop.time() - began, "turns": float(play.index)}
    metrics["close_failed"] = float(len(notes))
    texts = [_text(error, play.side, stop is Stop.TIME_LIMIT, loop.time() - began)] if error else []
    return Outcome(_episode(spec, play, trajectories, stop, metrics, "; ".join(texts + notes) or None), error)


async def _loop(
    env: Env,
    make_agent: MakeAgent,
    session: Session,
    spec: EpisodeSpec,
    limits: Limits,
    play: _Play,
    on_act: Callable[[], None],
) -> Stop:
    observation, _ = checked_reset(await _timed(play, "env.reset", env.reset, seed=spec.seed))
    play.messages += copy.deepcopy(observation)
    play.side = "agent"
    agent: Agent = agent_of(make_agent, spec.row)(env.tools)
    while True:
        on_act()
        action = checked_action(await _timed(play, "agent.act", agent.act, observation, session))
        play.acted = True
        play.messages.append(copy.deepcopy(action))
        play.marks = session.marks()
        play.ends.update(play.marks)
        step = checked_step(await _timed(play, "env.step", env.step, action))
        shares = checked_shares(step.info, step.reward)
        _record(play, play.marks, step.reward, checked_parts(step.info), str(action.get("name") or ""))
        share_out(play.turns, shares)
        observation = step.observation
        play.messages += copy.deepcopy(observation)
        if step.terminated:
            return Stop.FINISHED
        if step.truncated:
            return Stop.TRUNCATED
        if play.index >= limits.max_turns:
            return Stop.MAX_TURNS


def _record(
    play: _Play,
    marks: tuple[tuple[int, int], ...],
    reward: float | None,
    parts: dict[str, float] | None = None,
    agent: str = "",
) -> None:
    places: list[tuple[int | None, int]] = [*marks] or [(None, 0)]
    for trajectory, end in places[:-1]:
        play.turns.append(Turn(play.index, trajectory, end, 0.0, agent))
    trajectory, end = places[-1]
    play.turns.append(Turn(play.index, trajectory, end, reward, agent, parts or {}))
    play.index += 1
    play.acted = False


def _finish_turns(play: _Play, trajectories: tuple[Trajectory, ...], stop: Stop) -> Stop:
    """Give the action that was cut short its turn, and settle whether there is a verdict."""
    tail = tuple(
        (index, len(trajectory))
        for index, trajectory in enumerate(trajectories)
        if _sampled_after(trajectory, play.ends.get(index, 0))
    )
    if play.acted:
        # The action was made and what it earned is not known: no verdict.
        _record(play, play.marks, None)
    elif tail:
        # Cut in the middle of the action: its tokens earned nothing.
        _record(play, tail, 0.0 if stop.scored else None)
    if stop.scored and not play.turns:
        return Stop.NO_VERDICT  # a limit was met before the policy could do anything
    if stop.scored and stop is not Stop.TIME_LIMIT and any(t.reward is None for t in play.turns):
        return Stop.NO_VERDICT
    return stop


def _sampled_after(trajectory: Trajectory, place: int) -> bool:
    at = 0
    for segment in trajectory.segments:
        at += len(segment)
        if at > place and isinstance(segment.source, Sampled):
            return True
    return False


def _attribute(error: Exception, side: str, failure: AgentRLError | None) -> Stop:
    if side.startswith("agent") and failure is not None and not isinstance(error, AgentRLError):
        error = failure  # what a client library made of it
    if isinstance(error, LimitReached):
        return Stop.MAX_TOKENS if side.startswith("agent") else Stop.TRUNCATED
    if isinstance(error, SandboxLost):
        return Stop.SANDBOX_LOST
    if isinstance(error, EngineError):
        return Stop.ENGINE_LOST
    if isinstance(error, InfrastructureError):
        return Stop.ENGINE_LOST if side.startswith("agent") else Stop.SANDBOX_LOST
    return Stop.AGENT_ERROR if side.startswith("agent") else Stop.ENV_ERROR


def _text(error: Exception, side: str, timed_out: bool, seconds: float) -> str:
    if timed_out:
        return f"the time limit was reached after {seconds:.1f} s, in {side}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = "" if isinstance(error, AgentRLError) or not frames else f" ({frames[-1].filename}:{frames[-1].lineno})"
    return legible(f"{side} raised {type(error).__name__}: {error}{where}")


def _episode(
    spec: EpisodeSpec,
    play: _Play,
    trajectories: tuple[Trajectory, ...],
    stop: Stop,
    metrics: dict[str, float],
    error: str | None,
) -> Episode:
    named = tuple(
        t if t.trajectory is None else replace(t, agent=trajectories[t.trajectory].agent or t.agent)
        for t in play.turns
        if t.trajectory is None or t.trajectory < len(trajectories)
    )
    return Episode(
        group=spec.group,
        sample=spec.sample,
        attempt=spec.attempt,
        seed=spec.seed,
        row=spec.row,
        messages=tuple(play.messages),
        turns=named,
        trajectories=trajectories,
        stop=stop,
        metrics=metrics,
        error=error,
    )


async def _timed(play: _Play, side: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    play.side = side
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        return await play.caller(function, *args, **kwargs)
    finally:
        key = f"{side.replace('.', '_')}_s"
        play.seconds[key] = play.seconds.get(key, 0.0) + loop.time() - began


async def close_env(env: Env, seconds: float, caller: Caller | None = None) -> list[str]:
    """Close it within `seconds`; what went wrong, as text, since the episode is over either way."""
    caller = caller or Caller()
    try:
        async with asyncio.timeout(seconds):
            await caller(env.close)
    except TimeoutError:
        return [f"env.close did not return within {seconds} s"]
    except Exception as error:
        return [_text(error, "env.close", False, 0.0)]
    finally:
        caller.end()
    return []


async def _close_session(session: Session, seconds: float) -> tuple[tuple[Trajectory, ...], list[str]]:
    try:
        async with asyncio.timeout(seconds):
            return await session.close(), []
    except (TimeoutError, InfrastructureError) as error:
        return (), [f"the session did not close: {error or f'no answer within {seconds} s'}"]
