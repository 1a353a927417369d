"""Simple programming tasks to try a coding environment with: `n * 3 + 4` and the like."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agentrl.errors import ContractError
from agentrl.types import Row

SIZES = {"train": 20_000, "eval": 256}


def sample_rows(split: str, seed: int) -> Iterator[Row]:
    """Rows of a split, the same for the same seed; every eighth pair of numbers is for evaluation."""
    if split not in SIZES:
        raise ContractError(f"there is no split {split!r}, only {sorted(SIZES)}")
    return _rows(split, random.Random(f"{split} {seed}"))


def _rows(split: str, rng: random.Random) -> Iterator[Row]:
    made = 0
    while made < SIZES[split]:
        a, b = rng.randint(2, 9), rng.randint(1, 9)
        if ((a * 31 + b) % 8 == 0) != (split == "eval"):
            continue
        made += 1
        first, second = rng.choice("+-*"), rng.choice("+-*")
        expression = f"n {first} {a} {second} {b}"
        tests = [
            {"stdin": f"{n}\n", "stdout": f"{_value(n, first, a, second, b)}\n"} for n in rng.sample(range(2, 40), 3)
        ]
        yield {"question": f"Read n, print {expression}", "expression": expression, "mode": "stdio", "tests": tests}


def _value(n: int, first: str, a: int, second: str, b: int) -> int:
    act = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    if second == "*" and first != "*":
        return act[first](n, a * b)
    return act[second](act[first](n, a), b)
