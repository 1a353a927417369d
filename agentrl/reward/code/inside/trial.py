"""Runs tests against a program that is not here. Runs in a box in which no candidate ever ran.

What the tests import from the program are stand-ins (`tape.py`). A statement whose call has no answer yet is skipped,
and the next ones go on to find more calls, so that a few runs find all. What comes back is plain data: `==` in a test
is Python's own, never the candidate's.

    {"test", "preamble", "entry_point", "kinds", "ops", "answers", "end"}
    → {"ops", "pending", "results": [{"name", "outcome": "passed" | "failed" | "skipped", "kind", "text"}], "broken"}
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import linecache
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from agentrl.reward.code.inside import shim
from agentrl.reward.code.inside.tape import Pending, Tape, stand_in

MODULES = ("solution", "candidate", "main", "your_module", "answer")
"""Names under which tests may import the program."""
_PENDING = "_pending_answer_"
_LOOK = "_look_for_calls_"
_Result = dict[str, str]
_Test = tuple[str, Callable[[], Any]]


def main(request: dict[str, Any]) -> None:
    """Run once with what the tape holds, and print what came of it."""
    channel, sys.stdout = sys.stdout, io.StringIO()
    sys.modules.setdefault("pytest", shim)
    tape = Tape(request)
    results: list[_Result] = []
    broken = ""
    try:
        module = _load(request, tape)
        for name, test in _tests(module, request["entry_point"], tape):
            random.seed(0)
            results.append(_run(name, test))
        if not results and _asserts(request["test"]):  # they held, or loading would have failed
            results.append({"name": "asserts", "outcome": "passed", "kind": "", "text": ""})
    except Pending:
        pass
    except Exception as error:  # the border between the row's tests and their judge
        broken = _text(error)
        if tape.ops:
            results.append({"name": "load", "outcome": "failed", "kind": type(error).__name__, "text": broken})
    out = {"ops": tape.ops, "pending": not tape.live, "results": results, "broken": broken}
    channel.write(json.dumps(out) + "\n")
    channel.flush()


def _load(request: dict[str, Any], tape: Tape) -> types.ModuleType:
    random.seed(0)
    names = dict.fromkeys(request["kinds"])
    for name in MODULES:
        sys.modules[name] = _Program(name, tape, names)
    module = types.ModuleType("tests")
    space = module.__dict__
    space[_PENDING] = Pending
    space[_LOOK] = tape.look
    # Helpers of the question are the row's own, not the candidate's versions of them.
    exec(compile(request["preamble"] or "", "preamble.py", "exec"), space)
    entry = request["entry_point"]
    for name in [entry] if entry else names:
        space.update(_Names(tape, [name]) if name not in space or name == entry else {})
    source = request["test"]
    linecache.cache["tests.py"] = (len(source), None, source.splitlines(True), "tests.py")
    tree = ast.parse(source)
    tree.body = _skippable(tree.body)
    exec(compile(ast.fix_missing_locations(tree), "tests.py", "exec"), space)
    return module


def _Names(tape: Tape, names: list[str]) -> dict[str, Any]:
    return {name: stand_in(tape, name) for name in names if tape.kinds.get(name, {}).get("kind") != "value"}


class _Program(types.ModuleType):
    def __init__(self, name: str, tape: Tape, names: dict[str, None]) -> None:
        super().__init__(name)
        self._tape = tape
        self.__all__ = list(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in(self._tape, name)
        setattr(self, name, value)
        return value


def _asserts(source: str) -> bool:
    """Whether a test file asserts something outside its functions."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    outside = [statement for statement in ast.parse(source).body if not isinstance(statement, kinds)]
    return any(isinstance(node, ast.Assert) for statement in outside for node in ast.walk(statement))


def _skippable(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements, each of which may lack its answer without holding up the next."""
    return [_skip(statement) for statement in body]


def _skip(statement: ast.stmt) -> ast.stmt:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For)):
        statement.body = _skippable(statement.body)
    if not isinstance(statement, (ast.Assert, ast.Expr, ast.With, ast.If, ast.For)):
        return statement
    handler = ast.ExceptHandler(ast.Name(_PENDING, ast.Load()), None, _search(statement))
    if isinstance(statement, ast.For):
        inner = ast.Try(statement.body, [handler], [], [])
        statement.body = [ast.copy_location(inner, statement)]
    return ast.copy_location(ast.Try([statement], [handler], [], []), statement)


def _search(statement: ast.stmt) -> list[ast.stmt]:
    """Every call in an assertion by itself, the inner ones first: `assert f(1) == f(2)` needs both."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)][::-1]
    if not isinstance(statement, ast.Assert) or len(calls) < 2:
        return [ast.Pass()]
    both: list[ast.expr] = [ast.Name(_PENDING, ast.Load()), ast.Name("Exception", ast.Load())]
    ignore = ast.ExceptHandler(ast.Tuple(both, ast.Load()), None, [ast.Pass()])
    tries: list[ast.stmt] = [ast.Try([ast.Expr(call)], [ignore], [], []) for call in calls]
    look = [ast.Expr(ast.Call(ast.Name(_LOOK, ast.Load()), [ast.Constant(on)], [])) for on in (True, False)]
    return [look[0], *tries, look[1]]


def _tests(module: types.ModuleType, entry_point: str | None, tape: Tape) -> Iterator[_Test]:
    space = module.__dict__
    if entry_point and callable(space.get("check")):
        yield "check", lambda: space["check"](space[entry_point])
        return
    found = [(name, value) for name, value in list(space.items()) if getattr(value, "__module__", None) == "tests"]
    for name, value in found:
        if isinstance(value, type) and any(kind.__module__ == "unittest.case" for kind in value.__mro__):
            loader: Any = sys.modules["unittest"]
            for case in loader.defaultTestLoader.loadTestsFromTestCase(value):
                yield f"{name}.{case.id().rpartition('.')[2]}", case.debug
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [m for m in vars(value) if m.startswith("test")]:
                yield from _cases(f"{name}.{method}", getattr(value, method), space, value)
        elif inspect.isfunction(value) and name.startswith("test"):
            yield from _cases(name, value, space, None)


def _cases(name: str, function: Any, space: dict[str, Any], owner: type | None) -> Iterator[_Test]:
    for number, values in enumerate(shim.parameters(function)):
        label = f"{name}[{number}]" if values else name
        yield label, lambda values=values: shim.call(function, values, space, owner)  # type: ignore[misc]


def _run(name: str, test: Callable[[], Any]) -> _Result:
    try:
        test()
    except Pending:
        return {"name": name, "outcome": "failed", "kind": "", "text": "no answer"}
    except BaseException as error:
        if isinstance(error, (shim.Skipped, getattr(sys.modules.get("unittest"), "SkipTest", shim.Skipped))):
            return {"name": name, "outcome": "skipped", "kind": "", "text": str(error)}
        return {"name": name, "outcome": "failed", "kind": type(error).__name__, "text": _text(error)}
    return {"name": name, "outcome": "passed", "kind": "", "text": ""}


def _text(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    where = f"line {frames[-1].lineno}: {frames[-1].line}: " if frames else ""
    return f"{where}{type(error).__name__}: {error}"[:2000]
