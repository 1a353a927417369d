"""THE loop: every way an episode can end, whose fault it was, and what is recorded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.errors import DeadlineExceeded, EngineError, RequestRefused, SandboxLost
from agentrl.rollout.episode import EpisodeSpec, Limits, Outcome, run_episode
from agentrl.rollout.session import SessionSpec
from agentrl.testing.clock import run_virtual
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.session import ByteSession
from agentrl.types import Message, Row, Step, Stop, Version

CASES = {
    case["id"]: case
    for case in map(
        json.loads, (Path(__file__).parent.parent / "cases" / "rollout_loop.jsonl").read_text().splitlines()
    )
}
ON = [{"role": "user", "content": "on"}]


class Plain(Env):
    """Ends after `row["turns"]` turns; a test replaces what it wants to go wrong."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.seen: list[Message] = []
        self.closed = 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return [{"role": "user", "content": "go"}], {}

    async def step(self, action: Message) -> Any:
        self.seen.append(action)
        last = len(self.seen) >= self.row.get("turns", 2)
        return Step(ON, 1.0 if last else 0.5, last, False, {})

    async def close(self) -> None:
        self.closed += 1


async def play(
    env: Env,
    agent: type[Agent] = Agent,
    *,
    engine: ScriptedEngine | None = None,
    max_turns: int = 5,
    seconds: float = 100.0,
    max_tokens: int = 100,
) -> Outcome:
    deadline = asyncio.get_running_loop().time() + seconds
    session = ByteSession(
        engine or ScriptedEngine(lambda prompt: [65, 66], delay=1.0),
        SessionSpec("s", 1, True, 1.0, max_tokens, deadline),
    )
    outcome = await run_episode(env, agent, session, EpisodeSpec(3, 1, 0, 9, env.row), Limits(max_turns, deadline, 5.0))
    assert session.closed == 1
    if isinstance(env, Plain):
        assert env.closed == 1
    return outcome


def test_a_whole_episode() -> None:
    episode = run_virtual(play(Plain({"turns": 2}))).episode
    assert episode.stop is Stop.FINISHED
    assert [(t.index, t.trajectory, t.end, t.reward) for t in episode.turns] == [(0, 0, 4, 0.5), (1, 0, 8, 1.0)]
    assert episode.reward == 1.5
    assert [m["content"] for m in episode.messages] == ["go", "AB", "on", "AB", "on"]
    assert len(episode.trajectories[0]) == 8
    assert episode.error is None
    assert episode.metrics["agent_act_s"] == pytest.approx(2.0)


def test_turn_limit_is_not_a_natural_end() -> None:
    case = CASES["I04"]["input"]
    episode = run_virtual(play(Plain({"turns": 99}), max_turns=case["max_turns"])).episode
    assert episode.stop is Stop.MAX_TURNS
    assert len(episode.turns) == case["max_turns"]
    assert episode.scored


def test_junk_for_ever_is_bounded() -> None:
    case = CASES["I13"]
    env = Plain({"turns": 10**9})
    run_virtual(play(env, max_turns=case["input"]["max_turns"]))
    assert len(env.seen) == case["expected"]["turns_used_max"]


def test_no_step_after_the_end() -> None:
    assert CASES["I08"]["expected"]["silent_new_episode"] is False
    env = Plain({"turns": 1})
    run_virtual(play(env, max_turns=50))
    assert len(env.seen) == 1


def test_truncation_is_one_flag_an_episode() -> None:
    assert CASES["I09"]["expected"]["flags_per_episode"] == 1

    class Cut(Plain):
        async def step(self, action: Message) -> Any:
            return Step([], 0.25, False, True, {})

    episode = run_virtual(play(Cut({}))).episode
    assert episode.stop is Stop.TRUNCATED
    assert episode.reward == 0.25


class Raises(Plain):
    """Raises `error` in the method that its row names."""

    error: BaseException = RuntimeError("boom")

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.row["where"] == "reset":
            raise self.error
        return await super().reset()

    async def step(self, action: Message) -> Any:
        if self.row["where"] == "step":
            raise self.error
        return await super().step(action)


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (RuntimeError("boom"), Stop.ENV_ERROR),
        (TimeoutError("its own"), Stop.ENV_ERROR),
        (ExceptionGroup("both", [ValueError("one")]), Stop.ENV_ERROR),
        (SandboxLost("gone"), Stop.SANDBOX_LOST),
        (DeadlineExceeded("grader"), Stop.SANDBOX_LOST),
        (EngineError("judge"), Stop.ENGINE_LOST),
    ],
)
def test_an_environments_error_is_no_verdict(where: str, error: Exception, stop: Stop) -> None:
    assert CASES["I10"]["expected"]["reward"] is None
    env = Raises({"where": where})
    env.error = error
    outcome = run_virtual(play(env))
    assert outcome.error is error
    assert outcome.episode.stop is stop
    assert outcome.episode.reward is None
    assert outcome.episode.error is not None
    assert f"env.{where} raised {type(error).__name__}: {error}" in outcome.episode.error
    assert len(outcome.episode.trajectories) == (0 if where == "reset" else 1)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("mine")])
def test_what_would_end_the_run_ends_the_episode(plain: bool, error: BaseException) -> None:
    class Exits(Plain):
        async def step(self, action: Message) -> Any:
            raise error

    class PlainExits(Plain):
        def step(self, action: Message) -> Any:
            raise error

    outcome = run_virtual(play((PlainExits if plain else Exits)({})))
    assert outcome.episode.stop is Stop.ENV_ERROR
    assert outcome.episode.error is not None
    assert f"env.step raised RuntimeError: {type(error).__name__}: {error} ({__file__}:" in outcome.episode.error


def test_a_generator_is_no_step() -> None:
    class Yields(Plain):
        async def step(self, action: Message) -> Any:
            yield Step(ON, 1.0, True, False, {})

    assert "got a async_generator" in str(run_virtual(play(Yields({}))).error)


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (RuntimeError("boom"), Stop.AGENT_ERROR),
        (EngineError("lost"), Stop.ENGINE_LOST),
        (RequestRefused("no"), Stop.ENGINE_LOST),
        (DeadlineExceeded("slow"), Stop.ENGINE_LOST),
    ],
)
def test_an_agents_error(error: Exception, stop: Stop) -> None:
    class Bad(Agent):
        async def act(self, observation: list[Message], client: Any) -> Message:
            action = await super().act(observation, client)
            if len(self.messages) > 2:
                raise error
            return action

    episode = run_virtual(play(Plain({}), Bad)).episode
    assert episode.stop is stop
    assert episode.reward is None
    assert [t.reward for t in episode.turns] == [0.5, None]


def test_what_a_client_library_made_of_a_lost_engine() -> None:
    class Dead(ScriptedEngine):
        async def generate(self, request: Any, on_tokens: Any = None) -> Any:
            raise EngineError("down")

    class Wrapped(Agent):
        async def act(self, observation: list[Message], client: Any) -> Message:
            try:
                return await super().act(observation, client)
            except EngineError:
                raise ConnectionError("HTTP 503") from None

    assert run_virtual(play(Plain({}), Wrapped, engine=Dead(lambda p: [1]))).episode.stop is Stop.ENGINE_LOST


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("reset", ON, r"reset must return \(messages, info\).*five values"),
        ("reset", (ON, None), "reset: info must be a dict"),
        ("reset", ("text", {}), "reset: the observation must be a list of chat messages"),
        (
            "step",
            (ON, 1.0, True, {}),
            r"five values \(observation, reward, terminated, truncated, info\), got a tuple of 4",
        ),
        ("step", (ON, float("nan"), True, False, {}), "the reward must be a finite number.*got nan"),
        ("step", (ON, 10**400, True, False, {}), "the reward must be a finite number of at most 1e.30"),
        ("step", (ON, float("inf"), True, False, {}), "the reward must be a finite number"),
        ("step", (ON, "1.0", True, False, {}), "the reward must be a finite number"),
        ("step", (ON, 1.0, 1, False, {}), "terminated must be a bool"),
        ("step", (["x"], 1.0, True, False, {}), "a chat message is a dict with a 'role'"),
        ("step", (ON, np.array([1.0]), True, False, {}), "the reward must be a finite number"),
        ("step", (ON, 1.0, True, None, {}), "truncated must be a bool"),
        ("step", (None, 1.0, True, False, {}), "observation must be a list of chat messages, got a NoneType"),
        ("step", (ON[0], 1.0, True, False, {}), "observation must be a list of chat messages, got a dict"),
        ("step", [ON, 1.0, True, False, {}], "five values .*, got a list"),
        ("step", (ON, 1.0, True, False, None), "step: info must be a dict"),
        ("step", ([{"role": "user", "content": 5}], 0.0, False, False, {}), "content must be text, got a int 5"),
        (
            "step",
            ([{"role": "user", "content": "\ud800"}], 0.0, False, False, {}),
            "no valid Unicode.*errors='replace'",
        ),
        ("reset", ([{"role": "user", "content": b"x"}], {}), "content must be text, got a bytes"),
        ("step", (ON, 1.0, True, False, {"reward_parts": {"a": "b"}}), "reward part 'a' must be a finite number"),
    ],
)
def test_a_broken_contract_is_named(method: str, value: Any, message: str) -> None:
    assert "five-value" in CASES["I12"]["expected"]["raises"]
    env = Plain({})

    async def broken(*_: Any, **__: Any) -> Any:
        return value

    setattr(env, method, broken)
    outcome = run_virtual(play(env))
    assert outcome.episode.stop is Stop.ENV_ERROR
    with pytest.raises(Exception, match=message):
        raise outcome.error or AssertionError


def test_no_verdict_and_parts() -> None:
    class Judge(Plain):
        async def step(self, action: Message) -> Any:
            self.seen.append(action)
            first = len(self.seen) == 1
            return Step(ON, 0.5 if first else None, not first, False, {"reward_parts": {"form": 0.5}} if first else {})

    episode = run_virtual(play(Judge({}))).episode
    assert episode.stop is Stop.NO_VERDICT
    assert episode.reward is None
    assert episode.turns[0].parts == {"form": 0.5}


def test_tokens_run_out() -> None:
    episode = run_virtual(play(Plain({"turns": 99}), max_turns=99, max_tokens=6)).episode
    assert episode.stop is Stop.MAX_TOKENS
    assert len(episode.turns) == 3
    assert episode.reward == 1.5


def test_time_runs_out_while_the_policy_speaks() -> None:
    episode = run_virtual(play(Plain({"turns": 99}), max_turns=99, seconds=2.5)).episode
    assert episode.stop is Stop.TIME_LIMIT
    assert episode.reward == 1.0
    assert episode.error == "the time limit was reached after 2.5 s, in agent.act"


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_that_never_answers_gives_no_verdict(where: str) -> None:
    class Stuck(Plain):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if where == "reset":
                await asyncio.get_running_loop().create_future()
            return await super().reset()

        async def step(self, action: Message) -> Any:
            await asyncio.get_running_loop().create_future()

    episode = run_virtual(play(Stuck({}))).episode
    assert episode.stop is (Stop.NO_VERDICT if where == "reset" else Stop.TIME_LIMIT)
    assert episode.reward is None
    assert f"env.{where}" in (episode.error or "")


@pytest.mark.parametrize("hang", [True, False])
def test_a_bad_close_is_noted(hang: bool) -> None:
    class Sticky(Plain):
        async def close(self) -> None:
            await super().close()
            if hang:
                await asyncio.sleep(1e6)
            raise RuntimeError("no")

    episode = run_virtual(play(Sticky({}))).episode
    assert episode.stop is Stop.FINISHED
    assert episode.metrics["close_failed"] == 1
    assert ("did not return within 5.0 s" if hang else "env.close raised RuntimeError: no") in (episode.error or "")


def test_cancellation_passes_and_still_closes() -> None:
    env = Plain({})

    async def body() -> None:
        task = asyncio.create_task(play(env))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(body())
    assert env.closed == 1


def test_an_agent_that_calls_no_model_and_tools_found_in_reset() -> None:
    class Silent(Agent):
        async def act(self, observation: list[Message], client: Any) -> Message:
            return {"role": "assistant", "content": str(len(self.tools))}

    class Discovers(Plain):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.tools = (object(), object())  # type: ignore[assignment]
            return await super().reset()

    env = Discovers({"turns": 1})
    episode = run_virtual(play(env, Silent)).episode
    assert env.seen[0]["content"] == "2"
    assert [(t.trajectory, t.end, t.reward) for t in episode.turns] == [(None, 0, 1.0)]
    assert episode.trajectories == ()


def test_an_action_over_two_versions_has_both() -> None:
    engine = ScriptedEngine(lambda prompt: [65] * 4, token_delay=1.0)

    async def body() -> Outcome:
        task = asyncio.create_task(play(Plain({"turns": 1}), engine=engine))
        await asyncio.sleep(1.5)
        engine.set_version(Version(1, 1))
        return await task

    episode = run_virtual(body()).episode
    assert episode.trajectories[0].versions.tolist() == [-1, -1, 0, 0, 1, 1]
    assert episode.oldest_version == 0
