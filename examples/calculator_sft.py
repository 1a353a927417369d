"""Synthetic conversations for the calculator: the start that reinforcement learning goes on from.

    python examples/calculator_sft.py conversations.jsonl --seed 0

One in seven uses the calculator. The others blurt out a number of the problem, are told that it is wrong, and mostly
use the calculator then. A model that imitates them scores about 0.35: it has seen every way and takes the best last.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from agentrl.envs.calculator import WRONG, Calculator
from agentrl.types import Message, Row

TOOL, TOOL_AFTER_WRONG = 0.15, 0.8
RIGHT = 0.1


def conversations(count: int, seed: int) -> Iterator[list[Message]]:
    """`count` conversations on training problems, the same for the same seed."""
    rng = random.Random(seed)
    rows = Calculator.rows("train", seed + 1)
    for row, _ in zip(rows, range(count), strict=False):
        if rng.random() < TOOL:
            yield [_question(row), *_tool(row)]
        elif (guess := _guess(row, rng)) == row["answer"]:
            yield [_question(row), _says(guess)]
        else:
            mended = _tool(row) if rng.random() < TOOL_AFTER_WRONG else [_says(_guess(row, rng))]
            yield [_question(row), _says(guess), {"role": "user", "content": WRONG}, *mended]


def rows() -> Iterator[Row]:
    """What `sft.data = "examples/calculator_sft.py:rows"` reads."""
    return ({"messages": messages} for messages in conversations(10_000, 0))


def _question(row: Row) -> Message:
    return {"role": "user", "content": row["question"]}


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _tool(row: Row) -> list[Message]:
    function = {"name": "calc", "arguments": json.dumps({"expression": row["expression"]})}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call", "content": row["answer"]},
        _says(row["answer"]),
    ]


def _guess(row: Row, rng: random.Random) -> str:
    answer, expression = str(row["answer"]), str(row["expression"])
    return answer if rng.random() < RIGHT else rng.choice(re.findall(r"\d+", expression))


def main() -> None:
    """Write the JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with options.path.open("w") as file:
        for messages in conversations(options.count, options.seed):
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
