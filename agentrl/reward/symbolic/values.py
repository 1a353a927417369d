"""What an answer can be. Every value is exact: numbers are sympy rationals or expressions of them, never floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Expr = Any
"""A sympy expression; sympy is imported by the parser and the comparison alone."""


@dataclass(frozen=True)
class Scalar:
    """A number or an expression with symbols. `unit` is a canonical unit, "remark" for a counted noun, or ""."""

    expr: Expr
    unit: str = ""


@dataclass(frozen=True)
class Matrix:
    """Rows of expressions."""

    rows: tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True)
class Text:
    """Words, compared without regard to case."""

    words: str


@dataclass(frozen=True)
class Bracket:
    """`(a, b)`, `[a, b)`, …: ordered. Of two numbers it is a pair or an interval, whichever the other side is."""

    items: tuple[Value, ...]
    left: str
    right: str


@dataclass(frozen=True)
class Braces:
    """A finite set."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Listing:
    """A bare list: `1, 2`, `1 or 2`, `±1`. Unordered, but it counts how often a value stands in it."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class RealSet:
    """A set of real numbers: an interval, a union, the solutions of an inequality (`name` is its variable)."""

    set: Expr
    name: str = ""


@dataclass(frozen=True)
class Named:
    """`name = value`; `equation` is the same as an expression that is zero, where the name is a symbol."""

    name: str
    value: Value
    equation: Expr | None = None


@dataclass(frozen=True)
class Equation:
    """An expression that is zero."""

    expr: Expr


@dataclass(frozen=True)
class Inequality:
    """Expressions that are less than zero (or at most zero, where not strict), all at once; several symbols."""

    parts: tuple[tuple[Expr, bool], ...]


@dataclass(frozen=True)
class Ratio:
    """`a:b:c`. `clock` keeps the text where it can be a time of day."""

    parts: tuple[Expr, ...]
    clock: str = ""


@dataclass(frozen=True)
class Residues:
    """Whole numbers by what they leave modulo `modulus`, in smallest form; `name` is the variable, or ""."""

    name: str
    classes: frozenset[int]
    modulus: int


@dataclass(frozen=True)
class Choice:
    """`(B) 5`: the letter of an offered answer, and the answer where it is written too."""

    letter: str
    value: Value | None = None


Value = (
    Choice
    | Scalar
    | Matrix
    | Text
    | Bracket
    | Braces
    | Listing
    | RealSet
    | Named
    | Equation
    | Inequality
    | Ratio
    | Residues
)
