"""Environments of the shelf are learnable: a tiny model, started by imitation, learns each of them from its rewards."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.agents.in_turn import InTurn
from agentrl.env import Env
from agentrl.envs.bargain import ASKED, Bargain
from agentrl.envs.calculator import WRONG, Calculator
from agentrl.envs.countdown import Countdown
from agentrl.envs.guess_number import HIGHER, LOWER, NO_NUMBER, GuessNumber
from agentrl.testing.tiny import CALCULATOR
from agentrl.types import Message, Row
from tests.envs.classroom import Classroom

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def conversations(
    make_env: Callable[[Row], Env], rows: list[Row], say: Callable[[Env, list[Message], random.Random], str | Message]
) -> Iterator[list[Message]]:
    """Whole episodes on rows at random, in which `say` speaks."""

    async def play(env: Env, rng: random.Random) -> list[Message]:
        messages, _ = await env.reset(seed=1)
        while True:
            said = say(env, messages, rng)
            action: Message = {"role": "assistant", "content": said} if isinstance(said, str) else said
            step = await env.step(action)
            messages = [*messages, action, *step.observation]
            if step.terminated:
                return messages

    rng = random.Random(0)
    while True:
        yield asyncio.run(play(make_env(rng.choice(rows)), rng))


def learned(rewards: list[float], *, least: float, gain: float) -> None:
    start, end = sum(rewards[:3]) / 3, max(sum(rewards[i : i + 3]) / 3 for i in range(len(rewards) - 2))
    assert end >= least, rewards
    assert end >= start + gain, rewards


def test_guess_number(tmp_path: Path) -> None:
    rows: list[Row] = [{"low": 1, "high": 3, "secret": secret} for secret in (1, 2, 3)]

    def make(row: Row) -> GuessNumber:
        return GuessNumber(row, guesses=2)

    def say(env: Env, messages: list[Message], rng: random.Random) -> str:
        assert isinstance(env, GuessNumber)
        heeds = rng.random() < 0.35
        return str(rng.randint(env.low, env.high) if heeds else rng.randint(1, 3))

    (first, *_) = asyncio.run(make(rows[0]).reset())[0]
    room = Classroom(tmp_path, make, fixed=(first["content"], HIGHER, LOWER, NO_NUMBER), max_tokens=16)
    room.imitate(conversations(make, rows, say), steps=80)
    learned(room.learn(rows, steps=60, enough=0.82, groups=9), least=0.75, gain=0.1)


def test_calculator_with_its_tool(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows: list[Row] = []
    for _ in range(400):
        expression = f"{rng.randint(10, 99)} + {rng.randint(10, 99)}"
        question = f"State the final answer to the following arithmetic problem: {expression} ="
        rows.append({"question": question, "expression": expression, "answer": str(eval(expression))})

    def say(env: Env, messages: list[Message], rng: random.Random) -> str | Message:
        if messages[-1]["role"] == "tool":
            return str(messages[-1]["content"])
        if rng.random() < 0.3:
            function = {"name": "calc", "arguments": json.dumps({"expression": env.row["expression"]})}
            call = {"id": "call", "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        return str(env.row["expression"]).split()[0]

    room = Classroom(tmp_path, Calculator, fixed=(*CALCULATOR, WRONG), max_turns=4, max_tokens=96)
    room.imitate(conversations(Calculator, rows, say), steps=250, lr=2e-3)
    learned(room.learn(rows, steps=40, enough=0.65, lr=6e-4), least=0.6, gain=0.2)


def test_countdown(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows: list[Row] = []
    for _ in range(300):
        a, b = rng.sample(range(1, 10), 2)
        rows.append({"numbers": [a, b], "target": a + b})

    def make(row: Row) -> Countdown:
        return Countdown(row, whole=True)

    def say(env: Env, messages: list[Message], rng: random.Random) -> str:
        a, b = env.row["numbers"]
        return f"{a} {rng.choice('+-*/')} {b}"

    fixed = (
        "Using each of the numbers ",
        " exactly once, with + - * / and brackets, make ",
        ". Answer with the expression alone.",
    )
    room = Classroom(tmp_path, make, fixed=fixed, max_tokens=16)
    room.imitate(conversations(make, rows, say), steps=200, lr=2e-3)
    learned(room.learn(rows, steps=40, enough=0.8, lr=1e-3), least=0.7, gain=0.3)


def test_two_agents_learn_to_strike_a_bargain(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows: list[Row] = [{"cost": rng.randint(1, 3), "value": rng.randint(7, 9)} for _ in range(100)]

    def say(env: Env, messages: list[Message], rng: random.Random) -> str:
        heard = " says " in str(messages[-1]["content"])
        return "accept" if heard and rng.random() < 0.3 else str(rng.randint(1, 9))

    def alone() -> Iterator[list[Message]]:
        # Each agent sees its own part of the conversation alone.
        for messages in conversations(Bargain, rows, say):
            for first in (0, 2):
                part = [message for i in range(first, len(messages), 4) for message in messages[i : i + 2]]
                if part and part[-1]["role"] == "assistant":
                    yield part

    fixed = ("You buy. It is worth ", "You sell. It is worth ", " to you.", " The buyer says ", " The seller says ")
    room = Classroom(
        tmp_path,
        Bargain,
        fixed=(*fixed, f". {ASKED}", f" {ASKED}", "accept"),
        make_agent=InTurn,
        max_tokens=32,
        agents="each",
    )
    room.imitate(alone(), steps=120)
    learned(room.learn(rows, steps=50, enough=0.85, lr=1e-3), least=0.75, gain=0.1)
