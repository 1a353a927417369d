"""The part of pytest that tests of a program use, for boxes that have no pytest: raises, approx, parametrize, fixtures.

Tests always get this one, so that a verdict does not depend on what a box has installed.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """The test asked to be left out."""


class _Raised:
    value: BaseException
    type: type[BaseException]

    def match(self, pattern: str) -> bool:
        """Whether the error's text holds the pattern; AssertionError where it does not."""
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{str(self.value)!r} does not match {pattern!r}")
        return True


@contextlib.contextmanager
def _raises(expected: Any, match: str | None) -> Iterator[_Raised]:
    info = _Raised()
    try:
        yield info
    except expected as error:
        info.value, info.type = error, type(error)
        if match is not None:
            info.match(match)
        return
    raise AssertionError(f"did not raise {expected}")


def raises(expected: Any, function: Any = None, *args: Any, match: str | None = None, **kwargs: Any) -> Any:
    """`with raises(ValueError):`, or `raises(ValueError, f, 1)`."""
    if function is None:
        return _raises(expected, match)
    with _raises(expected, match) as info:
        function(*args, **kwargs)
    return info


class approx:
    """A number, or a collection of them, that is equal to what is close to it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.nan_ok = expected, nan_ok
        self.abs = 1e-12 if abs is None else abs
        self.rel = (1e-6 if abs is None else 0.0) if rel is None else rel

    def __eq__(self, got: object) -> bool:
        return self._same(got, self.expected)

    def _same(self, got: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return (
                type(got) is dict
                and got.keys() == expected.keys()
                and all(self._same(got[key], expected[key]) for key in expected)
            )
        if isinstance(expected, (list, tuple)):
            return type(got) is type(expected) and len(got) == len(expected) and all(map(self._same, got, expected))
        if type(got) not in (int, float, bool) or not isinstance(expected, (int, float)):
            return type(got) is type(expected) and bool(got == expected)
        if self.nan_ok and got != got and expected != expected:
            return True
        return math.isclose(got, expected, rel_tol=self.rel, abs_tol=self.abs)

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"


class _Mark:
    def __getattr__(self, name: str) -> Any:
        if name in ("skip", "skipif", "xfail"):
            raise AttributeError(f"mark.{name} is not supported: a test that may be left out proves nothing")
        return lambda *args, **kwargs: args[0] if args and callable(args[0]) else lambda function: function

    @staticmethod
    def parametrize(names: Any, values: Any, ids: Any = None) -> Callable[[Any], Any]:
        """One case a value; names as in pytest."""
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        cases = [dict(zip(keys, (value,) if len(keys) == 1 else value, strict=False)) for value in values]

        def mark(function: Any) -> Any:
            function.parameter_sets = [*getattr(function, "parameter_sets", []), cases]
            return function

        return mark


mark = _Mark()


def param(*values: Any, id: str | None = None) -> Any:
    """The values of one case."""
    return values if len(values) != 1 else values[0]


def fixture(function: Any = None, **_: Any) -> Any:
    """A function whose value tests ask for by name; made anew for every test."""
    if function is None:
        return fixture
    function.is_fixture = True
    return function


def skip(reason: str = "") -> None:
    """Leave the test out."""
    raise Skipped(reason)


def fail(reason: str = "") -> None:
    """Fail the test."""
    raise AssertionError(reason)


def parameters(function: Any) -> list[dict[str, Any]]:
    """The keyword arguments of each case of a test."""
    sets = getattr(function, "parameter_sets", [])
    return [{k: v for case in cases for k, v in case.items()} for cases in itertools.product(*sets)]


def call(function: Any, values: dict[str, Any], space: dict[str, Any], owner: type | None) -> Any:
    """Run a test (of a class: on a fresh object, between its set-up and tear-down) with its fixtures."""
    with contextlib.ExitStack() as stack:
        subject = owner() if owner is not None else None
        if subject is not None:
            getattr(subject, "setup_method", lambda *_: None)(*([function] if _wants_one(subject) else []))
            stack.callback(getattr(subject, "teardown_method", lambda *_: None))
        arguments = _arguments(function, values, {**space, **(vars(owner) if owner else {})}, stack, subject)
        result = function(subject, **arguments) if subject is not None else function(**arguments)
        if inspect.iscoroutine(result):
            import asyncio  # few tests need it

            return asyncio.run(result)
        return result


def _wants_one(subject: Any) -> bool:
    setup = getattr(subject, "setup_method", None)
    return setup is not None and len(inspect.signature(setup).parameters) == 1


def _arguments(
    function: Any, values: dict[str, Any], space: dict[str, Any], stack: contextlib.ExitStack, subject: Any
) -> dict[str, Any]:
    return {
        name: values[name] if name in values else _fixture(name, space, stack, subject)
        for name in inspect.signature(function).parameters
        if name != "self"
    }


def _folder(stack: contextlib.ExitStack) -> Path:
    # Of the same name in every run of the tests: a call that is given it must be the same call.
    home = Path(tempfile.gettempdir())
    place = next(path for path in (home / f"tmp_path{n}" for n in itertools.count()) if not path.exists())
    place.mkdir()
    stack.callback(shutil.rmtree, place, ignore_errors=True)
    return place


def _fixture(name: str, space: dict[str, Any], stack: contextlib.ExitStack, subject: Any) -> Any:
    if name == "tmp_path":
        return _folder(stack)
    made = space.get(name)
    if not getattr(made, "is_fixture", False):
        raise LookupError(f"there is no fixture {name!r}")
    arguments = _arguments(made, {}, space, stack, subject)
    first = [subject] if "self" in inspect.signature(made).parameters else []  # type: ignore[arg-type]
    result = made(*first, **arguments)  # type: ignore[misc]
    if not inspect.isgenerator(result):
        return result
    stack.callback(lambda: next(result, None))
    return next(result)
