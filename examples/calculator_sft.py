"""Synthetic conversations for the calculator: the start that reinforcement learning improves on.

    python examples/calculator_sft.py conversations.jsonl --seed 0

Three in ten use the calculator; the others answer at once and are mostly wrong, some try again after being told so.
A model that imitates them scores about 0.35: enough to find out which way pays, far from taking it always.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from agentrl.envs.calculator import WRONG, Calculator
from agentrl.types import Message, Row

TOOL, RETRY, TOOL_AFTER_WRONG = 0.2, 0.5, 0.6
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
    off = 0 if rng.random() < right else rng.choice([-10, -9, -2, -1, 1, 2, 9, 10])
    return str(int(row["answer"]) + off)


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
