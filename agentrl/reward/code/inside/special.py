"""Asks a row's own judge about outputs. Runs in a box in which no candidate ever ran.

{"judge": source of `def judge(stdin, stdout, expected)`, "cases": [[stdin, stdout, expected], …]} → [true, …]
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(request: dict[str, Any]) -> None:
    """Print a verdict a case. What the judge prints goes to stderr."""
    channel, sys.stdout = sys.stdout, sys.stderr
    space: dict[str, Any] = {"__name__": "judge"}
    exec(compile(request["judge"], "judge.py", "exec"), space)
    verdicts = [_ask(space["judge"], case) for case in request["cases"]]
    channel.write(json.dumps(verdicts) + "\n")


def _ask(judge: Any, case: list[Any]) -> bool:
    try:
        return judge(*case) is True
    except Exception as error:  # an output that the judge cannot read is a wrong one
        print(f"judge: {type(error).__name__}: {error}", file=sys.stderr)
        return False
