"""The tests that a model may see, and what it is told when one fails."""

from __future__ import annotations

from dataclasses import replace

from agentrl.reward.code.task import Case, Mode, Task, parse_task
from agentrl.reward.code.verdict import Status, Verdict
from agentrl.types import Row


def public_task(task: Task, row: Row, count: int) -> Task | None:
    """The task with the row's `public_tests` (test files: `public_test`), else its first `count`; None for none."""
    if task.mode is Mode.UNIT:
        text = row.get("public_test")
        return replace(task, test=text) if text else None
    own = row.get("public_tests")
    cases = parse_task({**row, "tests": own}).cases if own is not None else task.cases[:count]
    return replace(task, cases=cases) if cases else None


def told(verdict: Verdict, task: Task) -> str:
    """The first failure of a public task; "" where there is none, or no verdict."""
    if verdict.reward is None or verdict.status is Status.PASSED:
        return ""
    number, failed = next((n, t) for n, t in enumerate(verdict.tests) if t.status is not Status.PASSED)
    if number >= len(task.cases):
        return f"{failed.name}: {failed.status}: {failed.detail}."
    return f"{_asked(task.cases[number], task)}, {failed.detail or failed.status}."


def _asked(case: Case, task: Task) -> str:
    if task.mode is Mode.STDIO:
        return f"Input {case.stdin!r}: expected {str(case.expected).rstrip()!r}"
    return f"{task.entry_point}{case.args!r}: expected {case.expected!r}"
