"""Calls of a candidate's functions, made in its own box, as answers that are data.

Everything read here was written by whoever was in the box. What is not an answer of the right form counts as none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentrl.reward.code.boxes import json_lines, run_inside
from agentrl.reward.code.verdict import Status
from agentrl.sandbox.types import Sandbox

MOST_BYTES = 700_000
"""Most that the answers of one program may hold, in JSON."""
_GRACE = 5.0

Op = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """What became of one process of the program: the answers it gave, and how it ended."""

    answers: tuple[dict[str, Any], ...]
    end: str
    status: Status
    """How it ended: PASSED where it answered every call."""


async def run_sessions(
    box: Sandbox, program: str, sessions: list[list[Op]], seconds: float, budget: float
) -> list[Session]:
    """Run each list of calls in a process of its own, within `seconds` each and `budget` together."""
    request = {"program": program, "sessions": sessions, "seconds": seconds, "bytes": MOST_BYTES}
    result = await run_inside(box, "candidate", request, min(budget, seconds * len(sessions)) + _GRACE)
    found = [_session(line, len(ops)) for line, ops in zip(json_lines(result.stdout), sessions, strict=False)]
    if result.timed_out:
        rest = Session((), "the time limit", Status.TIMEOUT)
    elif result.oom:
        rest = Session((), "the memory limit", Status.MEMORY)
    elif result.truncated:
        rest = Session((), "the output limit", Status.OUTPUT_LIMIT)
    else:
        rest = Session((), f"exit code {result.returncode}", Status.RUNTIME_ERROR)
    if result.oom:
        found = [one if one.status is not Status.RUNTIME_ERROR else rest for one in found]
    return found + [rest] * (len(sessions) - len(found))


def _session(line: Any, calls: int) -> Session:
    match line:
        case {"answers": list(answers), "end": str(end), "code": int(code)}:
            good = tuple(answer for answer in answers[:calls] if _is_answer(answer))
        case _:
            return Session((), "an answer that is none", Status.RUNTIME_ERROR)
    ends = {
        "done": Status.PASSED,
        "timeout": Status.TIMEOUT,
        "flood": Status.OUTPUT_LIMIT,
    }
    status = ends.get(end, Status.RUNTIME_ERROR)
    if status is Status.PASSED and len(good) < calls:
        status = Status.RUNTIME_ERROR
    texts = {"timeout": "the time limit", "flood": "too large an answer"}
    return Session(good, texts.get(end, f"exit code {code}"), status)


def _is_answer(answer: Any) -> bool:
    match answer:
        case {"error": {"names": [str(), *_], "text": str()}}:
            return all(isinstance(name, str) for name in answer["error"]["names"])
        case {"value": _}:
            return True
    return False
