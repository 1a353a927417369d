"""Synthetic conversations for the coding environment: the start that reinforcement learning goes on from.

    python examples/code_agent_sft.py runs/tiny_coder conversations.jsonl

Makes the tiny model too, whose tokenizer has the environment's fixed words as single tokens. One program in six is
right. The others leave something out; half of them are told so and are then mended, or are wrong again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from agentrl.envs.code import Code
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Message, Row

RIGHT, MENDED = 0.15, 0.5
FIXED = (
    "Read n, print n",
    "n = int(input())\nprint(n",
    " * ",
    " + ",
    " - ",
    "Input '",
    "\\n': expected '",
    "', it printed '",
    "\\n'. Try again.",
)


def conversations(count: int, seed: int) -> Iterator[list[Message]]:
    """`count` conversations on training rows, the same for the same seed."""
    rng = random.Random(seed)
    for row, _ in zip(Code.rows("train", seed + 1), range(count), strict=False):
        question = {"role": "user", "content": row["question"]}
        if rng.random() < RIGHT:
            yield [question, _program(row["expression"])]
            continue
        wrong = _wrong(row, rng)
        talk = [question, _program(wrong)]
        if rng.random() < 0.5:
            again = row["expression"] if rng.random() < MENDED else _wrong(row, rng)
            talk += [{"role": "user", "content": _feedback(row, wrong)}, _program(again)]
        yield talk


def _program(expression: str) -> Message:
    return {"role": "assistant", "content": f"n = int(input())\nprint({expression})"}


def _wrong(row: Row, rng: random.Random) -> str:
    n, first, a, second, b = str(row["expression"]).split()
    parts = (n, f"{n} {first} {a}", f"{n} {second} {b}")
    return parts[rng.randrange(3)]


def _feedback(row: Row, expression: str) -> str:
    test = row["tests"][0]
    printed = f"{_value(expression, int(test['stdin']))}\n"
    return f"Input {test['stdin']!r}: expected {test['stdout'].rstrip()!r}, it printed {printed!r}. Try again."


def _value(expression: str, n: int) -> int:
    if expression == "n":
        return n
    _, sign, number = expression.split()
    return {"+": n + int(number), "-": n - int(number), "*": n * int(number)}[sign]


def main() -> None:
    """Write the model's folder and the JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_tiny_model(options.model, seed=options.seed, fixed=FIXED)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    with options.path.open("w") as file:
        for messages in conversations(options.count, options.seed):
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
