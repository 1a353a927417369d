"""Calculations on what was read, refused where they make no sense or would not end."""

from __future__ import annotations

from typing import Any

import sympy

from agentrl.reward.symbolic.tokens import Unreadable
from agentrl.reward.symbolic.values import Braces, Bracket, Expr, Listing, Matrix, RealSet, Scalar, Text, Value

LARGEST_BITS = 40_000
"""An integer power or factorial of more bits stays a symbol: it is never worked out."""


def factorial(value: Expr) -> Expr:
    if value.is_Integer and value.p > 3000:
        return sympy.factorial(value, evaluate=False)
    return sympy.factorial(value)


SIMPLE: dict[str, Any] = {
    "factorial": factorial,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "cot": sympy.cot,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "cis": lambda angle: sympy.cos(angle) + sympy.I * sympy.sin(angle),
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "arccot": sympy.acot,
    "asin": sympy.asin,
    "acos": sympy.acos,
    "atan": sympy.atan,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "tanh": sympy.tanh,
    "coth": sympy.coth,
    "ln": sympy.log,
    "exp": sympy.exp,
    "abs": sympy.Abs,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
}
INVERSE = {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan, "cot": sympy.acot}
MANY: dict[str, Any] = {"min": sympy.Min, "max": sympy.Max, "gcd": sympy.gcd, "lcm": sympy.lcm}
SETS: dict[str, Any] = {
    "R": sympy.S.Reals,
    "Z": sympy.S.Integers,
    "N": sympy.S.Naturals,
    "Q": sympy.S.Rationals,
    "C": sympy.S.Complexes,
}


def number(value: Any) -> Expr:
    if isinstance(value, Bracket | Matrix | Braces | RealSet | Listing | Text) or value is None:
        raise Unreadable("a calculation with what is no number")
    return value.expr if isinstance(value, Scalar) else value


def unwrapped(value: Value) -> Any:
    return value.expr if isinstance(value, Scalar) else value


def nonzero(value: Any) -> Expr:
    found = number(value)
    if found == 0:
        raise Unreadable("a division by zero")
    return found


def binomial(above: Expr, below: Expr) -> Expr:
    """The binomial coefficient, not worked out where it would be too long."""
    large = above.is_Integer and below.is_Integer and abs(below.p) * abs(above.p).bit_length() > LARGEST_BITS
    return sympy.binomial(above, below, evaluate=not large)


def power(base: Expr, exponent: Expr) -> Expr:
    """`base ** exponent`, not worked out where the number would be too long."""
    if base == 0 and (exponent.is_nonpositive or exponent.has(sympy.oo)):
        raise Unreadable("a power of zero that is no number")
    if base.is_Rational and exponent.is_Rational:
        bits = max(abs(base.p).bit_length(), base.q.bit_length())
        if bits > 1 and abs(exponent) * bits > LARGEST_BITS:
            return sympy.Pow(base, exponent, evaluate=False)
    return base**exponent


def product(left: Value, right: Value) -> Any:
    """Two numbers, or a number and a matrix, multiplied."""
    if isinstance(left, Matrix) == isinstance(right, Matrix):
        return number(left) * number(right)
    matrix, factor = (left, number(right)) if isinstance(left, Matrix) else (right, number(left))
    assert isinstance(matrix, Matrix)
    return Matrix(tuple(tuple(factor * entry for entry in row) for row in matrix.rows))


def combined(operation: str, left: Value, right: Value) -> Value:
    a, b = as_set(left), as_set(right)
    if operation == "cup":
        result = sympy.Union(a, b)
    elif operation == "cap":
        result = sympy.Intersection(a, b)
    else:
        result = sympy.Complement(a, b)
    if isinstance(result, sympy.FiniteSet):
        return Braces(tuple(Scalar(item) for item in result.args))
    return RealSet(result)


def as_set(value: Value) -> Expr:
    """A value as a sympy set; Unreadable where it is none."""
    if isinstance(value, RealSet):
        return value.set
    if isinstance(value, Braces):
        return sympy.FiniteSet(*(number(item) for item in value.items))
    if isinstance(value, Bracket) and len(value.items) == 2:
        low, high = (number(item) for item in value.items)
        if low.is_extended_real and high.is_extended_real and (low < high) == sympy.true:
            return sympy.Interval(low, high, value.left == "(", value.right == ")")
    raise Unreadable("a set operation on what is no set of numbers")
