"""Arithmetic with feedback: answer directly, be told when that was wrong and try again, or call a calculator first.

    user       State the final answer to the following arithmetic problem: 98 + 93 =
    assistant  calc("98 + 93")                    or at once: 93
    tool       191                                user: wrong, try again
    assistant  191                       1.0      assistant  191                        0.25

The problems are reasoning-gym's `chain_sum`: two numbers of up to two digits, or three of one. A row is
`{"question", "expression", "answer"}`.
"""

from __future__ import annotations

import ast
import operator
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Row, Step

WRONG = "wrong, try again"
SIZES = {"train": 20_000, "eval": 256}
FAMILIES: tuple[tuple[str, dict[str, int]], ...] = (
    ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    ("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
)
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """The exact value of an expression of numbers, + - * / and brackets; ValueError for anything else."""
    if len(expression) > 200:
        raise ValueError(f"the expression has {len(expression)} characters, at most 200 are allowed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"cannot work out {expression!r}: {error}") from error
    return str(value.numerator) if value.denominator == 1 else str(float(value))


def _value(node: ast.AST) -> Fraction:
    # bool is an int, and `True + 1` is no arithmetic.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: Fraction = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return result
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return Fraction(_OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError(f"only numbers, + - * / and brackets are allowed, got {type(node).__name__}")


@tool
async def calc(expression: str) -> str:
    """Work out an arithmetic expression exactly.

    Args:
        expression: numbers, + - * / and brackets
    """
    return calculate(expression)


class Calculator(Env):
    """`retries` wrong answers are told and may be mended, for `retry_reward` instead of 1; calls cost nothing."""

    tools = (calc,)
    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, retries: int = 1, retry_reward: float = 0.25) -> None:
        super().__init__(row)
        self.retries = retries
        self.retry_reward = retry_reward
        self.wrong = 0
        self.over = True

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """Problems of both sizes in turn; no expression is in both splits, whatever the seeds."""
        # Two seconds of import that only the maker of rows pays.
        import reasoning_gym

        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        # reasoning-gym draws problem i from `seed + i`: neighbouring seeds would give the same problems, shifted.
        problems = [
            reasoning_gym.create_dataset(name, seed=1_000_003 * seed, size=100 * SIZES[split], **sizes)
            for name, sizes in FAMILIES
        ]
        made = at = 0
        while made < SIZES[split]:
            problem = problems[at % len(problems)][at // len(problems)]
            at += 1
            expression: str = problem["metadata"]["expression"]
            if (zlib.crc32(expression.encode()) % 8 == 0) == (split == "eval"):
                made += 1
                yield {"question": problem["question"], "expression": expression, "answer": problem["answer"]}

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The question; nothing is random."""
        self.wrong, self.over = 0, False
        return [{"role": "user", "content": self.row["question"]}], {}

    async def step(self, action: Message) -> Step:
        """Run the calls, or judge the answer."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        if action.get("tool_calls"):
            return Step(await run_tools(self.tools, action), 0.0, False, False, {})
        if (action.get("content") or "").strip() == self.row["answer"]:
            self.over = True
            return Step([], 1.0 if self.wrong == 0 else self.retry_reward, True, False, {"tries": self.wrong + 1})
        self.wrong += 1
        self.over = self.wrong > self.retries
        if self.over:
            return Step([], 0.0, True, False, {"tries": self.wrong})
        return Step([{"role": "user", "content": WRONG}], 0.0, False, False, {})

    def oracle(self, messages: list[Message]) -> str:
        """The answer, without the calculator."""
        return str(self.row["answer"])
