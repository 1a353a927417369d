"""Synthetic conversations for the calculator: the start that reinforcement learning goes on from.

    python examples/calculator_sft.py conversations.jsonl --seed 0

One in seven uses the calculator. The others blurt out a number of the problem, which is mostly wrong; half of them are
told so, and then use the calculator or blurt again. A model that imitates them scores about 0.4: it has seen every way
and takes the right one seldom.
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

TOOL, RETRY, TOOL_AFTER_WRONG = 0.15, 0.5, 0.6
RIGHT_AT_ONCE = 0.1


def conversations(count: int, seed: int) -> Iterator[list[Message]]:
    """`count` conversations on training problems, the same for the same seed."""
    rng = random.Random(seed)
    rows = Calculator.rows("train", seed + 1)
    for row, _ in zip(rows, range(count), strict=False):
        kind = rng.random()
        if kind < TOOL:
            yield [_question(row), *_tool(row)]
        elif kind < TOOL + RETRY:
            wrong = [_says(_guess(row, rng, 0.0)), {"role": "user", "content": WRONG}]
            mended = _tool(row) if rng.random() < TOOL_AFTER_WRONG else [_says(_guess(row, rng, RIGHT_AT_ONCE))]
            yield [_question(row), *wrong, *mended]
        else:
            yield [_question(row), _says(_guess(row, rng, RIGHT_AT_ONCE))]


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


def _guess(row: Row, rng: random.Random, right: float) -> str:
    answer, expression = str(row["answer"]), str(row["expression"])
    return answer if rng.random() < right else rng.choice(re.findall(r"\d+", expression))


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
