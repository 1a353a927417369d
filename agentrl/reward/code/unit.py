"""Test files, run where the candidate is not.

The tests run in one box with stand-ins for the program, the program in another. Neither waits for the other: the tests
run, note the calls that they would make, and end; the calls are made in the program's box; the tests run again with the
answers. When a run finds every call answered its results are the verdict. See `inside/tape.py`.
"""

from __future__ import annotations

import ast
import builtins
import time
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxLost
from agentrl.reward.code.boxes import json_lines, run_inside
from agentrl.reward.code.extract import parsed
from agentrl.reward.code.line import Line
from agentrl.reward.code.sessions import Session, run_sessions
from agentrl.reward.code.task import Task
from agentrl.reward.code.verdict import Status, TestResult

_ROUNDS = 400
_TRIAL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Run:
    ops: list[dict[str, Any]]
    pending: bool
    results: list[dict[str, str]]
    broken: str


async def run_tests(
    pool: Line, program: str, task: Task, seconds: float, budget: float
) -> tuple[list[TestResult], str]:
    """The results of the test file; none, and why, where it asks the program nothing."""
    session = Session((), "it was not started", Status.PASSED)
    ops: list[dict[str, Any]] = []
    used = 0.0
    kinds = _kinds(program)
    for _ in range(_ROUNDS):
        run = await _trial(pool, task, kinds, ops, session)
        if not run.pending:
            return _results(run, session)
        if used > budget:
            break
        ops = run.ops
        async with pool.box() as box:
            began = time.monotonic()
            (session,) = await run_sessions(box, program, [ops], seconds, budget)
            used += time.monotonic() - began
    return [TestResult("tests", Status.TIMEOUT, f"not settled within {budget:g} s")], ""


async def _trial(pool: Line, task: Task, kinds: Any, ops: list[dict[str, Any]], session: Session) -> _Run:
    request = {
        "test": task.test,
        "preamble": task.preamble,
        "entry_point": task.entry_point,
        "kinds": kinds,
        "ops": ops,
        "answers": list(session.answers),
        "end": session.end,
    }
    async with pool.box() as box:
        result = await run_inside(box, "trial", request, _TRIAL_SECONDS)
    lines = json_lines(result.stdout)
    if lines:
        return _Run(lines[0]["ops"], lines[0]["pending"], lines[0]["results"], lines[0]["broken"])
    if result.timed_out and ops:
        late = {"name": "tests", "outcome": "failed", "kind": "Timeout", "text": "the tests did not end"}
        return _Run(ops, False, [late], "")
    if ops and (result.oom or result.truncated or result.returncode):
        # Its answers are all that differs from the run before, which ended well.
        died = {
            "name": "tests",
            "outcome": "failed",
            "kind": "",
            "text": f"the tests died: {result.stderr_text[-500:]}",
        }
        return _Run(ops, False, [died], "")
    raise SandboxLost(f"the tests could not be run (exit code {result.returncode}): {result.stderr_text[-500:]}")


def _results(run: _Run, session: Session) -> tuple[list[TestResult], str]:
    counted = [result for result in run.results if result["outcome"] != "skipped"]
    if not run.ops or not counted:
        return [], run.broken or "no test calls the program"
    return [TestResult(one["name"], _status(one, session), one["text"]) for one in counted], ""


def _status(result: dict[str, str], session: Session) -> Status:
    if result["outcome"] == "passed":
        return Status.PASSED
    if result["kind"] == "ProgramEnded":
        return session.status if session.status is not Status.PASSED else Status.RUNTIME_ERROR
    known = {"MemoryError": Status.MEMORY, "Timeout": Status.TIMEOUT, "AssertionError": Status.WRONG_ANSWER}
    return known.get(result["kind"], Status.RUNTIME_ERROR)


def _kinds(program: str) -> dict[str, Any]:
    """What the program's names are, as far as its text tells: how a stand-in may behave before the program was run."""
    tree = parsed(program) or ast.Module([], [])
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = {"kind": "function", "async": isinstance(node, ast.AsyncFunctionDef)}
        elif isinstance(node, ast.ClassDef):
            found[node.name] = _class(node, found)
        elif isinstance(node, ast.Assign):
            found.update({t.id: {"kind": "value"} for t in node.targets if isinstance(t, ast.Name)})
    return found


def _class(node: ast.ClassDef, found: dict[str, Any]) -> dict[str, Any]:
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    above = [method for base in bases for method in found.get(base, {}).get("async", [])]
    inherited = [method for base in bases for method in found.get(base, {}).get("methods", [])]
    is_error = any(found.get(base, {}).get("kind") == "error" or _is_builtin_error(base) for base in bases)
    own = [inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
    methods = [inner.name for inner in own if not _is_property(inner)]
    waited = [inner.name for inner in own if isinstance(inner, ast.AsyncFunctionDef)]
    known = [base for base in bases if base in found or _is_builtin_error(base)]
    return {
        "kind": "error" if is_error else "class",
        "bases": known,
        "methods": [*inherited, *methods],
        "async": [*above, *waited],
    }


def _is_builtin_error(name: str) -> bool:
    kind = vars(builtins).get(name)
    return isinstance(kind, type) and issubclass(kind, Exception)


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [
        d.attr if isinstance(d, ast.Attribute) else d.id
        for d in node.decorator_list
        if isinstance(d, ast.Name | ast.Attribute)
    ]
    return any(name in ("property", "cached_property", "setter") for name in names)
