"""The calculator: exact arithmetic, no eval, two tries, splits that share nothing."""

from __future__ import annotations

import itertools
import json

import pytest

from agentrl.envs.calculator import WRONG, Calculator, calculate
from agentrl.errors import ContractError
from agentrl.types import Message

ROW = {"question": "2 + 3 =", "expression": "2 + 3", "answer": "5"}


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(expression: str) -> Message:
    function = {"name": "calc", "arguments": json.dumps({"expression": expression})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}


async def _env(**options: float) -> Calculator:
    env = Calculator(ROW, **options)  # type: ignore[arg-type]
    assert await env.reset(seed=1) == ([{"role": "user", "content": "2 + 3 ="}], {})
    return env


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("98 + 93 - 77", "114"),
        ("-(2 - 5) * 4", "12"),
        ("1 / 3 * 3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("7 / 2", "3.5"),
        ("(" * 90 + "1" + ")" * 90, "1"),
        (" 12 ", "12"),
    ],
)
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("__import__('os')", "2 ** 9", "9 // 2", "x", "1 if 1 else 2", "'a' * 9", "True + 1", "1j", "1 / 0", "1e400"),
        *("", "1 +", "2 = 2", "(1", "1" + "+1" * 100, "\0"),
    ],
)
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)


async def test_right_at_once_earns_one() -> None:
    step = await (await _env()).step(_says(" 5\n"))
    assert (step.observation, step.reward, step.terminated, step.truncated) == ([], 1.0, True, False)


async def test_a_wrong_answer_may_be_mended_once() -> None:
    env = await _env()
    step = await env.step(_says("6"))
    assert step == ([{"role": "user", "content": WRONG}], 0.0, False, False, {})
    assert (await env.step(_says("5"))).reward == 0.25
    env = await _env()
    await env.step(_says("6"))
    step = await env.step(_says("7"))
    assert (step.reward, step.terminated) == (0.0, True)


async def test_the_tool_tells_the_result_and_costs_nothing() -> None:
    env = await _env()
    step = await env.step(_calls("2 + 3"))
    assert step.observation == [{"role": "tool", "tool_call_id": "a", "content": "5"}]
    assert (step.terminated, step.truncated) == (False, False)
    assert (await env.step(_says("5"))).reward == 1.0


async def test_a_bad_call_is_an_observation() -> None:
    step = await (await _env()).step(_calls("2 +"))
    assert step.observation[0]["content"].startswith("error: ValueError: cannot work out '2 +'")


async def test_step_after_the_end_names_reset() -> None:
    env = await _env()
    await env.step(_says("5"))
    with pytest.raises(ContractError, match="call reset first"):
        await env.step(_says("5"))


def test_rows_are_reproducible_right_and_disjoint() -> None:
    train = list(itertools.islice(Calculator.rows("train", 3), 400))
    assert train == list(itertools.islice(Calculator.rows("train", 3), 400))
    assert all(calculate(row["expression"]) == row["answer"] for row in train)
    assert {len(row["expression"].split()) for row in train} == {3, 5}
    evaluated = list(Calculator.rows("eval", 4))
    assert len({row["expression"] for row in evaluated}) > 100
    assert {row["expression"] for row in train}.isdisjoint(row["expression"] for row in evaluated)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ContractError, match="has no split 'test', only"):
        next(Calculator.rows("test", 0))
