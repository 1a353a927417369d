r"""Countdown: make a target from the given numbers, each used exactly once, with + - * / and brackets.

    user       Using each of the numbers 3, 5, 7 exactly once … make 26. End with the expression in \boxed{}.
    assistant  7 * 3 is 21, and 5 more make 26: \boxed{7 * 3 + 5}                  1.0

A row is `{"numbers", "target"}`. An expression that uses the right numbers and misses the target earns `partial`.
"""

from __future__ import annotations

import ast
import itertools
import random
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.reward.extract import answer_text
from agentrl.reward.options import Marker
from agentrl.types import Info, Message, Row, Step

SIZES = {"train": 20_000, "eval": 256}
LONGEST = 200
_LATEX = {
    r"\times": "*",
    r"\cdot": "*",
    r"\div": "/",
    "×": "*",
    "÷": "/",
    "−": "-",
    r"\left": "",
    r"\right": "",
    "$": "",
}


class Countdown(Env):
    """`partial` is earned for a proper expression with another value, which gives a small model a slope to climb."""

    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, partial: float = 0.1, whole: bool = False) -> None:
        super().__init__(row)
        self.partial = partial
        self.marker = Marker.WHOLE if whole else Marker.BOXED
        self.over = True

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """Three or four numbers whose target can be reached; no problem is in both splits, whatever the seeds."""
        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        generator = random.Random(seed)
        made = 0
        while made < SIZES[split]:
            row = _problem(generator)
            if row is not None and (zlib.crc32(repr(row).encode()) % 8 == 0) == (split == "eval"):
                made += 1
                yield row

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The numbers and the target; nothing is random."""
        self.over = False
        numbers = ", ".join(map(str, self.row["numbers"]))
        ending = "Answer with the expression alone." if self.marker is Marker.WHOLE else "End with it in \\boxed{}."
        text = (
            f"Using each of the numbers {numbers} exactly once, with + - * / and brackets, make {self.row['target']}."
        )
        return [{"role": "user", "content": f"{text} {ending}"}], {}

    async def step(self, action: Message) -> Step:
        """Judge the expression."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        self.over = True
        answer = answer_text(action.get("content") or "", self.marker)
        try:
            value, used = evaluate(answer or "")
        except ValueError as error:
            return Step([], 0.0, True, False, {"reason": str(error)})
        if sorted(used) != sorted(self.row["numbers"]):
            return Step([], 0.0, True, False, {"reason": f"uses the numbers {used}"})
        right = value == self.row["target"]
        return Step([], 1.0 if right else self.partial, True, False, {"reason": "right" if right else f"makes {value}"})

    def oracle(self, messages: list[Message]) -> str | None:
        """An expression that makes the target, found by trying; None where there is none."""
        found = solve([(Fraction(number), str(number)) for number in self.row["numbers"]], Fraction(self.row["target"]))
        return found if found is None or self.marker is Marker.WHOLE else f"\\boxed{{{found}}}"


def solve(terms: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    """An expression of all the terms, each a value and how it is written, that has the target's value."""
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, j in itertools.permutations(range(len(terms)), 2):
        (a, left), (b, right) = terms[i], terms[j]
        rest = [term for place, term in enumerate(terms) if place not in (i, j)]
        values = {"+": a + b, "-": a - b, "*": a * b} | ({"/": a / b} if b else {})
        for sign, value in values.items():
            if found := solve([*rest, (value, f"({left} {sign} {right})")], target):
                return found
    return None


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value and the whole numbers used; ValueError for anything but those with + - * / and brackets."""
    for latex, plain in _LATEX.items():
        expression = expression.replace(latex, plain)
    expression = expression.partition("=")[0].strip()
    if not expression or len(expression) > LONGEST:
        raise ValueError(f"an expression of 1 to {LONGEST} characters is needed")
    used: list[int] = []
    try:
        return _value(ast.parse(expression, mode="eval").body, used), used
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot work out {expression!r}: {type(error).__name__}") from error


def _value(node: ast.AST, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, used), _value(node.right, used)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError(f"only whole numbers, + - * / and brackets are allowed, got {type(node).__name__}")


def _problem(generator: random.Random) -> Row | None:
    numbers = [generator.randint(1, 25) for _ in range(generator.choice((3, 4)))]
    target = Fraction(numbers[0])
    for number in numbers[1:]:
        target = generator.choice((target + number, target - number, target * number, target / number))
    generator.shuffle(numbers)
    if target.denominator != 1 or not 1 <= target <= 200:
        return None
    return {"numbers": numbers, "target": int(target)}
