"""Whether two expressions are the same: exactly where numbers allow it, else to 200 digits and at many points."""

from __future__ import annotations

import random
from typing import Any

import sympy

from agentrl.reward.symbolic.values import Expr

DIGITS = 200
"""Irrational numbers that agree so far are the same."""
POINTS = 6
"""Points at which expressions with symbols are compared, for each sign pattern that is tried."""
_RANGES = ((1, 7), (1, 7), (-5, 5), (-5, 5))


def identical(a: Expr, b: Expr) -> bool:
    """Whether `a` and `b` have one value, for every value of their symbols where both are real."""
    if a == b:
        return True
    if a.has(sympy.oo, -sympy.oo) or b.has(sympy.oo, -sympy.oo):
        return False
    difference = a - b
    if difference == 0:
        return True
    symbols = sorted(difference.free_symbols, key=str)
    if not symbols:
        return zero(difference)
    return _same_function(a, b, symbols)


def zero(number: Expr, digits: int = DIGITS) -> bool:
    """Whether an expression without symbols is zero."""
    if number.is_Rational:
        return bool(number == 0)
    value = sympy.N(number, 15, maxn=digits)
    return all(_vanishes(part) for part in value.as_real_imag())


def _vanishes(part: Any) -> bool:
    # sympy raises the precision until a digit is certain; where none is at `maxn` it says so with precision 1.
    if part == 0:
        return True
    if part.is_Float:
        return bool(part._prec == 1)
    return False


def _same_function(a: Expr, b: Expr, symbols: list[Expr]) -> bool:
    generator = random.Random(20_231)
    compared = 0
    for low, high in _RANGES:
        for _ in range(POINTS):
            point = {symbol: _rational(generator, low, high) for symbol in symbols}
            outcome = _agree(a, b, point, strict=low < 0)
            if outcome is False:
                return False
            compared += outcome is True
    return compared >= POINTS


def _rational(generator: random.Random, low: int, high: int) -> Expr:
    return sympy.Rational(generator.randint(low * 997 + 1, high * 997), 997)


def _agree(a: Expr, b: Expr, point: dict[Expr, Expr], *, strict: bool) -> bool | None:
    """Whether they agree at a point; None where one of them has no (real) value there."""
    left, right = a.xreplace(point), b.xreplace(point)
    if left.has(sympy.nan, sympy.zoo, sympy.oo) or right.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    # Away from the positive numbers roots and logarithms choose branches: there only real values count.
    if strict and not (_real_throughout(left) and _real_throughout(right)):
        return None
    return zero(left - right, 100)


def _real_throughout(number: Expr) -> bool:
    for node in sympy.preorder_traversal(number):
        if node.is_Pow and not node.exp.is_Integer and node.base.is_extended_nonnegative is not True:
            return False
        if node.func is sympy.log and node.args[0].is_extended_nonnegative is not True:
            return False
        if node is sympy.I:
            return False
    return True
