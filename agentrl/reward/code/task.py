"""A row of data as a task to grade: our own form, HumanEval's, LiveCodeBench's, and APPS' `input_output`.

    {"mode": "stdio", "tests": [{"stdin": "2 3\\n", "stdout": "5\\n"}]}         `stdout` may be a list of right outputs
    {"mode": "functional", "entry_point": "f" or "Solution.f", "tests": [{"args": [1], "kwargs": {}, "expected": 2}]}
    {"mode": "unit", "test": "def test_f():\\n    assert f(1) == 2\\n"}          pytest, unittest or HumanEval's `check`

All take `prompt_preamble` (source put before the program, e.g. its imports), `time_limit_s`, `float_tolerance`; stdio
takes `judge`, the source of `def judge(stdin, stdout, expected) -> bool` for outputs that cannot be listed.
"""

from __future__ import annotations

import base64
import enum
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import DataError
from agentrl.types import Row

_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
_CUSTOMARY = "\n".join(
    (
        *(f"from {name} import *" for name in [*_MODULES.split(), "builtins", "typing"]),
        *(f"import {name}" for name in _MODULES.split()),
        "sys.setrecursionlimit(50000)",
        "",
    )
)
"""What the graders of LiveCodeBench and APPS put before an answer: its starter code uses `List` without an import."""


class Mode(enum.StrEnum):
    """What is run."""

    STDIO = "stdio"
    """A program that reads standard input and writes standard output."""
    FUNCTIONAL = "functional"
    """Calls of a function or of a method of a class."""
    UNIT = "unit"
    """A test file."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test: `stdin` and `expected` outputs, or `args`, `kwargs` and the `expected` value."""

    stdin: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    expected: Any = None
    others: tuple[Any, ...] = ()
    """Of a call: further values that are right too."""


@dataclass(frozen=True, slots=True)
class Task:
    """What an answer is graded by. None of it but `preamble`, inputs and arguments enters the candidate's box."""

    mode: Mode
    cases: tuple[Case, ...] = ()
    test: str = ""
    entry_point: str | None = None
    preamble: str = ""
    judge: str | None = None
    seconds: float | None = None
    tolerance: float | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to grade by."""
        return not (self.test.strip() if self.mode is Mode.UNIT else self.cases)


def parse_task(row: Row) -> Task:
    """Read a row; DataError says what is wrong with it."""
    try:
        return _parse(row)
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise DataError(
            f"not a coding task ({type(error).__name__}: {error}); expected mode stdio, functional or unit with "
            f"its tests, or a HumanEval, LiveCodeBench or APPS row; it has {sorted(map(str, row))}"
        ) from error


def _parse(row: Row) -> Task:
    if "mode" in row:
        return _own(row)
    if "canonical_solution" in row or ("test" in row and "entry_point" in row):
        return Task(Mode.UNIT, test=row["test"], entry_point=row["entry_point"], preamble=row.get("prompt", ""))
    if "public_test_cases" in row or "private_test_cases" in row:
        return _live_code_bench(row)
    if "input_output" in row:
        return _apps(row)
    raise KeyError("mode")


def _own(row: Row) -> Task:
    mode = Mode(row["mode"])
    if mode is Mode.UNIT:
        cases: list[Case] = []
    elif mode is Mode.STDIO:
        cases = [Case(stdin=_text(test.get("stdin", "")), expected=_outputs(test["stdout"])) for test in row["tests"]]
    else:
        cases = [Case(args=tuple(t["args"]), kwargs=t.get("kwargs"), expected=t["expected"]) for t in row["tests"]]
    if mode is Mode.FUNCTIONAL and not row.get("entry_point"):
        raise KeyError("entry_point")
    seconds, tolerance = row.get("time_limit_s"), row.get("float_tolerance")
    return Task(
        mode,
        tuple(cases),
        _text(row["test"]) if mode is Mode.UNIT else "",
        row.get("entry_point"),
        row.get("prompt_preamble") or "",
        row.get("judge"),
        None if seconds is None else float(seconds),
        None if tolerance is None else float(tolerance),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is a {type(value).__name__}, expected text")
    return value


def _outputs(value: Any) -> Any:
    return [_text(one) for one in value] if isinstance(value, list) else _text(value)


def _live_code_bench(row: Row) -> Task:
    tests = [test for key in ("public_test_cases", "private_test_cases") for test in _packed(row.get(key) or "[]")]
    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    name = metadata.get("func_name")
    if not name:
        return Task(Mode.STDIO, tuple(Case(stdin=t["input"], expected=t["output"]) for t in tests), preamble=_CUSTOMARY)
    calls = [
        Case(
            args=tuple(json.loads(line) for line in t["input"].split("\n") if line.strip()),
            expected=json.loads(t["output"]),
        )
        for t in tests
    ]
    return Task(Mode.FUNCTIONAL, tuple(calls), entry_point=f"Solution.{name}", preamble=_CUSTOMARY)


def _packed(value: Any) -> Any:
    """JSON, or the base64 of zlib of a pickled text of it, in which nothing but text is read."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return json.loads(_TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(value)))).load())


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a pickle that should hold text")


def _apps(row: Row) -> Task:
    given = row["input_output"]
    data = json.loads(given) if isinstance(given, str) else given
    pairs = list(zip(data["inputs"], data["outputs"], strict=True))
    if name := data.get("fn_name"):
        # APPS wraps expected values in a list of one, but not all of them.
        calls = [
            Case(args=tuple(i), expected=o[0], others=(o,))
            if isinstance(o, list) and len(o) == 1
            else Case(args=tuple(i), expected=o)
            for i, o in pairs
        ]
        return Task(Mode.FUNCTIONAL, tuple(calls), entry_point=name, preamble=_CUSTOMARY)
    cases = tuple(Case(stdin=_joined(i), expected=_joined(o)) for i, o in pairs)
    return Task(Mode.STDIO, cases, preamble=_CUSTOMARY)


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else _text(value)
