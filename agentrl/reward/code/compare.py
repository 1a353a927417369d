"""When an output, or a returned value, is the expected one.

Outputs: line ends and blanks at the end of lines do not matter, nor do empty lines at the end; within a line, runs of
blanks count as one. Tokens must be equal as text; only where the *expected* token is written with a decimal point or an
exponent is a number within the tolerance right too (so `7` is not `007`, and `nan` is never 3.5).

Values: lists and tuples are interchangeable (expected values come from JSON), as are 1, 1.0 and True; where a float is
expected a number within the tolerance is right. Text is exact. Sets equal sets; keys may be text
that stands for a number, as in JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-6
"""Relative; the absolute tolerance, for numbers near zero, is a thousandth of it."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def same_output(got: str, expected: str | Sequence[str], tolerance: float = TOLERANCE) -> bool:
    """Whether the output is the expected one, or one of several that are."""
    if not isinstance(expected, str):
        return any(same_output(got, one, tolerance) for one in expected)
    ours, theirs = _lines(got), _lines(expected)
    return len(ours) == len(theirs) and all(_same_line(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(got: str, expected: str, tolerance: float) -> bool:
    if got == expected:
        return True
    ours, theirs = got.split(), expected.split()
    return len(ours) == len(theirs) and all(_same_token(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _same_token(got: str, expected: str, tolerance: float) -> bool:
    if got == expected:
        return True
    if not (_NUMBER.fullmatch(expected) and any(mark in expected for mark in ".eE")):
        return False
    return bool(_NUMBER.fullmatch(got)) and math.isfinite(float(got)) and _close(float(got), float(expected), tolerance)


def _close(got: float, expected: float, tolerance: float) -> bool:
    return math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


def same_value(got: Any, expected: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether a returned value (plain data) is the expected one."""
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return _same_number(got, expected, tolerance)
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        return len(got) == len(expected) and all(
            same_value(a, b, tolerance) for a, b in zip(got, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(got, dict):
        if got.keys() != expected.keys():
            got = {str(key): value for key, value in got.items()} if len({*map(str, got)}) == len(got) else got
        return got.keys() == expected.keys() and all(
            same_value(got[key], value, tolerance) for key, value in expected.items()
        )
    return type(got) is type(expected) and bool(got == expected)


def _same_number(got: float, expected: float, tolerance: float) -> bool:
    if got == expected or (got != got and expected != expected):
        return True
    if not isinstance(expected, float):
        return False
    try:
        return _close(float(got), expected, tolerance)
    except OverflowError:
        return False
