"""Wrappers: one concern each, around coroutines and plain functions alike, and classes that configs can name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.check import check_env
from agentrl.env import Env
from agentrl.errors import ConfigError, ContractError
from agentrl.testing.tiny import make_tiny_model
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Row, Step
from agentrl.wrappers import FormatObservation, RetryWithFeedback, ShapeReward, TimeLimit, TokenLimit, Wrapper, wrap


class Guess(Env):
    """A number from 0 to 9 that the seed decides; a wrong guess ends it when `strict`. Never refuses a step."""

    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, strict: bool = False) -> None:
        super().__init__(row)
        self.strict = strict
        self.closed = 0

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        return ({"n": n, "split": split} for n in range(9))

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
        self.tools = (self.submit,)
        self.secret = str(self.generator(seed).randint(0, 9))
        return [{"role": "user", "content": f"Guess. {self.row['n']}"}], {}

    async def step(self, action: Message) -> Step:
        if action.get("tool_calls"):
            await run_tools(self.tools, action)
            return Step([], 0.0, True, False, {})
        if action.get("content") == "?":
            return Step([], None, True, False, {})
        right = action.get("content") == self.secret
        told: list[Message] = [] if right or self.strict else [{"role": "user", "content": "no"}]
        return Step(told, float(right), right or self.strict, False, {"said": action.get("content")})

    async def close(self) -> None:
        self.closed += 1

    def oracle(self, messages: list[Message]) -> str:
        return self.secret

    @tool
    async def submit(self) -> str:
        """Give up."""
        return "ok"


class Plain(Env):
    """The same with plain functions, and four values long ago."""

    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return [{"role": "user", "content": "go"}], {}

    def step(self, action: Message) -> Any:
        return ([], 1.0, True, {}) if action["content"] == "old" else Step([], 1.0, True, False, {})


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def played(env: Env, *answers: str) -> list[Step]:
    await env.reset(seed=3)
    return [await env.step(says(answer)) for answer in answers]


async def test_a_wrapper_refuses_a_step_after_the_end_for_any_environment() -> None:
    guess = wrap(Guess)
    env = guess({"n": 1})
    with pytest.raises(ContractError, match="call reset first"):
        await env.step(says("1"))
    await env.reset(seed=3)
    assert (await env.step(says(str(env.oracle([]))))).terminated
    with pytest.raises(ContractError, match="call reset first"):
        await env.step(says("1"))
    await env.reset(seed=3)
    await env.close()


async def test_plain_environments_are_wrapped_and_checked() -> None:
    env = wrap(Plain)({})
    assert (await played(env, "1"))[0].reward == 1.0
    with pytest.raises(ContractError, match="five values"):
        await played(env, "old")
    await env.close()


async def test_time_limit() -> None:
    env = wrap(Guess, partial(TimeLimit, turns=2))({"n": 1})
    first, second = await played(env, "x", "y")
    assert (first.truncated, second.truncated, second.terminated) == (False, True, False)
    assert second.info == {"said": "y", "truncated_by": "max_turns"}
    env = wrap(Guess, partial(TimeLimit, turns=1))({"n": 1})
    await env.reset(seed=3)
    last = await env.step(says(str(env.oracle([]))))
    assert (last.terminated, last.truncated) == (True, False), "the task itself ended"
    env = wrap(Guess, partial(TimeLimit, seconds=1e-9))({"n": 1})
    assert (await played(env, "x"))[0].info["truncated_by"] == "time_limit"
    env = wrap(Guess, partial(TimeLimit, seconds=1e9))({"n": 1})
    assert not (await played(env, "x"))[0].truncated
    for wrong in ({}, {"turns": 1, "seconds": 1.0}, {"turns": 0}, {"seconds": -1.0}):
        with pytest.raises(ContractError, match="TimeLimit"):
            TimeLimit(Guess({"n": 1}), **wrong)


async def test_token_limit_counts_both_sides(tmp_path: Path) -> None:
    env = wrap(Guess, partial(TokenLimit, limit=18, count=len))({"n": 1})  # "Guess. 1" is 8, then 3 + 2 each
    steps = await played(env, "abc", "abc")
    assert [step.truncated for step in steps] == [False, True]
    assert steps[1].info["truncated_by"] == "max_tokens"
    model = make_tiny_model(tmp_path / "model", layers=1, hidden=16, heads=1, kv_heads=1)
    env = TokenLimit(Guess({"n": 1}), limit=10_000, count=model)
    await env.reset(seed=1)
    assert env.used == len("Guess. 1"), "one token a byte"
    call = {"id": "a", "type": "function", "function": {"name": "submit", "arguments": "{}"}}
    await env.step({"role": "assistant", "content": None, "tool_calls": [call]})
    assert env.used == len("Guess. 1submit{}")
    with pytest.raises(ConfigError, match=r"there is no .*tokenizer.json"):
        TokenLimit(Guess({"n": 1}), limit=1, count=tmp_path)


async def test_rewards_are_shaped_and_no_verdict_stays_none() -> None:
    env = wrap(Guess, partial(ShapeReward, shape=lambda reward, step: reward - 0.25 * (not step.terminated)))({"n": 1})
    steps = await played(env, "x", "?")
    assert [step.reward for step in steps] == [-0.25, None]
    assert env.reward_range is None


async def test_observations_are_formatted() -> None:
    def loud(message: Message) -> Message:
        return {**message, "content": message["content"].upper()}

    env = wrap(Guess, partial(FormatObservation, format=loud))({"n": 1})
    messages, _ = await env.reset(seed=3)
    assert messages[0]["content"] == "GUESS. 1"
    assert (await env.step(says("x"))).observation[0]["content"] == "NO"


async def test_retry_tells_and_plays_the_same_task_again() -> None:
    retry = partial(RetryWithFeedback, tries=3, discount=0.5, feedback=lambda step: f"Not {step.info['said']}.")
    strict: Any = wrap(Guess, retry)
    env = strict({"n": 1}, strict=True)
    await env.reset(seed=3)
    right = str(env.oracle([]))
    first = await env.step(says("x"))
    assert first == Step([{"role": "user", "content": "Not x."}], 0.0, False, False, {"said": "x", "tries": 1})
    assert env.oracle([]) == right, "the same seed, so the same secret"
    second = await env.step(says(right))
    assert (second.reward, second.terminated, second.info["tries"]) == (0.5, True, 2)
    wrong = await played(env, "x", "y", "z")
    assert [(step.reward, step.terminated) for step in wrong] == [(0.0, False), (0.0, False), (0.0, True)]
    (unjudged,) = await played(env, "?")
    assert (unjudged.reward, unjudged.terminated) == (None, True)


async def test_every_try_has_the_same_task_without_a_seed_too() -> None:
    begun: list[Any] = []

    class Drawn(Guess):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
            begun.append((options, self.generator(seed).random()))
            return await super().reset(seed=seed)

    wrapped: Any = wrap(Drawn, RetryWithFeedback)
    env = wrapped({"n": 1}, strict=True)
    for _ in range(2):
        await env.reset(options={"level": 2})
        await env.step(says("x"))
    assert begun[0] == begun[1] != begun[2] == begun[3]
    assert begun[1][0] == {"level": 2}


async def test_retry_leaves_no_call_unanswered() -> None:
    env = wrap(Guess, partial(RetryWithFeedback, feedback="Again."))({"n": 1})
    await env.reset(seed=3)
    call = {"id": "c1", "type": "function", "function": {"name": "submit", "arguments": "{}"}}
    step = await env.step({"role": "assistant", "content": None, "tool_calls": [call]})
    assert [message["role"] for message in step.observation] == ["tool", "user"]
    assert step.observation[0]["tool_call_id"] == "c1"


async def test_a_wrapper_of_your_own_is_a_few_lines() -> None:
    class Polite(Wrapper):
        async def started(self, messages: list[Message]) -> list[Message]:
            return [{"role": "system", "content": "Be polite."}, *messages]

    inner = Guess({"n": 1})
    env = Polite(inner)
    messages, _ = await env.reset(seed=1)
    assert messages[0]["role"] == "system"
    assert [t.name for t in env.tools] == ["submit"]
    await env.close()
    assert inner.closed == 1


def test_a_wrapped_class_is_like_the_one_inside() -> None:
    wrapped = wrap(Guess, partial(TimeLimit, turns=5), partial(RetryWithFeedback, tries=2))
    assert wrapped.__name__ == "Guess"
    assert list(wrapped.rows("train", 0)) == list(Guess.rows("train", 0))
    assert inspect.signature(wrapped) == inspect.signature(Guess)
    inspect.signature(wrapped).bind(None, strict=True)
    report = check_env(wrapped)
    assert report.findings == (), report
    # As it is, without a wrapper, it lets a step after the end pass.
    assert "step-after-end" in check_env(Guess).codes
