"""Whether two answers are the same. Every rule here is symmetric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from agentrl.reward.symbolic.arithmetic import as_set
from agentrl.reward.symbolic.numeric import identical
from agentrl.reward.symbolic.tokens import Unreadable
from agentrl.reward.symbolic.values import (
    Braces,
    Bracket,
    Choice,
    Equation,
    Expr,
    Inequality,
    Listing,
    Matrix,
    Named,
    Ratio,
    RealSet,
    Residues,
    Scalar,
    Text,
    Value,
)


@dataclass(frozen=True)
class Rules:
    """What is not exact: a relative tolerance for numbers, and whether a percent sign may be missing."""

    relative: float = 0.0
    lenient_percent: bool = False


def same(a: Value, b: Value, rules: Rules) -> bool:
    """Whether two values are the same answer."""
    if isinstance(a, Named) or isinstance(b, Named):
        return _named(a, b, rules)
    if isinstance(a, Choice) or isinstance(b, Choice):
        return _choices(a, b, rules)
    for left, right in ((a, b), (b, a)):
        if isinstance(left, Matrix) and isinstance(right, Bracket):
            return _matrix_is(left, right)
        if isinstance(left, RealSet) and isinstance(right, Listing):
            return _same_union(left, right, rules)
        if isinstance(left, Listing | Braces) and len(left.items) == 1 and not isinstance(right, Listing | Braces):
            if isinstance(left, Braces) and isinstance(left.items[0], Braces | RealSet):
                return False  # a set of one set is not that set
            return same(left.items[0], right, rules)
        if isinstance(left, Ratio) and isinstance(right, Scalar):
            return _ratio_is(left, right, rules)
        if isinstance(left, RealSet) and isinstance(right, Braces | Bracket | RealSet):
            return _same_set(left, right, rules)
        if isinstance(left, Listing) and isinstance(right, Braces):
            return _each_in(left.items, right.items, rules) and _each_in(right.items, left.items, rules)
        if isinstance(left, Listing) and isinstance(right, Bracket):
            return _system_is(left, right, rules)
    return _same_kind(a, b, rules)


def _same_kind(a: Value, b: Value, rules: Rules) -> bool:
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        return _scalars(a, b, rules)
    if isinstance(a, Text) and isinstance(b, Text):
        return a.words == b.words
    if isinstance(a, Bracket) and isinstance(b, Bracket):
        return (a.left, a.right) == (b.left, b.right) and _in_order(a.items, b.items, rules)
    if isinstance(a, Braces) and isinstance(b, Braces):
        return _each_in(a.items, b.items, rules) and _each_in(b.items, a.items, rules)
    if isinstance(a, Listing) and isinstance(b, Listing):
        return _matched(a.items, b.items, rules)
    if isinstance(a, Ratio) and isinstance(b, Ratio):
        return _ratios(a, b)
    if isinstance(a, Equation) and isinstance(b, Equation):
        return _proportional(_numerator(a.expr), _numerator(b.expr))
    if isinstance(a, Matrix) and isinstance(b, Matrix):
        return _same_rows(a.rows, b.rows)
    if isinstance(a, Residues) and isinstance(b, Residues):
        named = not a.name or not b.name or a.name == b.name
        return named and (a.classes, a.modulus) == (b.classes, b.modulus)
    if isinstance(a, Inequality) and isinstance(b, Inequality):
        return _inequalities(a, b)
    return False


def _named(a: Value, b: Value, rules: Rules) -> bool:
    """A name is dropped against a value without one. Two names must be the same, or their equations be."""
    if isinstance(a, Named) and isinstance(b, Named):
        if a.name == b.name or {"y"} == {a.name, b.name} - {n for n in (a.name, b.name) if n.endswith(")")}:
            return same(a.value, b.value, rules)
        return a.equation is not None and b.equation is not None and _proportional(a.equation, b.equation)
    named, other = (a, b) if isinstance(a, Named) else (b, a)
    assert isinstance(named, Named)
    if isinstance(other, Equation):
        return named.equation is not None and _proportional(_numerator(named.equation), _numerator(other.expr))
    if isinstance(other, RealSet) and other.name:
        return named.name == other.name and same(named.value, RealSet(other.set), rules)
    return same(named.value, other, rules)


def _choices(a: Value, b: Value, rules: Rules) -> bool:
    """Two letters must be the same, and what stands beside both; a letter alone is any spelling of it."""
    if isinstance(a, Choice) and isinstance(b, Choice):
        return a.letter == b.letter and (a.value is None or b.value is None or same(a.value, b.value, rules))
    chosen, other = (a, b) if isinstance(a, Choice) else (b, a)
    assert isinstance(chosen, Choice)
    if isinstance(other, Scalar | Text):
        text = other.words if isinstance(other, Text) else str(other.expr)
        if text.upper() == chosen.letter:
            return True
    return chosen.value is not None and same(chosen.value, other, rules)


def _matrix_is(matrix: Matrix, written: Bracket) -> bool:
    """`(1, 2)` is a matrix of one column or row; `[[1, 2], [3, 4]]` is one of two rows."""
    if (written.left, written.right) not in {("(", ")"), ("[", "]")}:
        return False
    items = written.items
    if all(isinstance(item, Bracket) for item in items):
        rows = tuple(_row(item) for item in items)
        return all(row is not None for row in rows) and _same_rows(matrix.rows, [row or () for row in rows])
    row = _row(written)
    if row is None or len(row) < 2:
        return False
    return _same_rows(matrix.rows, [row]) or _same_rows(matrix.rows, [(entry,) for entry in row])


def _row(written: Value) -> tuple[Expr, ...] | None:
    assert isinstance(written, Bracket)
    entries = tuple(item.expr for item in written.items if isinstance(item, Scalar))
    return entries if len(entries) == len(written.items) else None


def _same_rows(a: Sequence[Sequence[Expr]], b: Sequence[Sequence[Expr]]) -> bool:
    return [len(row) for row in a] == [len(row) for row in b] and all(
        identical(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)
    )


def _scalars(a: Scalar, b: Scalar, rules: Rules) -> bool:
    units = {unit for unit in (a.unit, b.unit) if unit not in {"", "remark"}}
    if len(units) == 2:
        return {"degree", "radian"} == units and _numbers(_radians(a), _radians(b), rules)
    if _numbers(a.expr, b.expr, rules):
        return "percent" not in units or a.unit == b.unit or not a.unit or not b.unit
    if "degree" in units and a.unit != b.unit:
        return _numbers(_radians(a), _radians(b), rules)
    if "percent" in units and a.unit != b.unit and rules.lenient_percent:
        plain, percent = (a.expr, b.expr) if b.unit == "percent" else (b.expr, a.expr)
        return _numbers(plain, 100 * percent, rules)
    return False


def _radians(value: Scalar) -> Expr:
    return value.expr * sympy.pi / 180 if value.unit == "degree" else value.expr


def _numbers(a: Expr, b: Expr, rules: Rules) -> bool:
    if identical(a, b):
        return True
    if not rules.relative or (a - b).free_symbols:
        return False
    left, right = (complex(sympy.N(x, 30)) for x in (a, b))
    return abs(left - right) <= rules.relative * max(abs(left), abs(right))


def _in_order(a: Sequence[Value], b: Sequence[Value], rules: Rules) -> bool:
    return len(a) == len(b) and all(same(x, y, rules) for x, y in zip(a, b, strict=True))


def _each_in(a: Sequence[Value], b: Sequence[Value], rules: Rules) -> bool:
    return all(any(same(x, y, rules) for y in b) for x in a)


def _matched(a: Sequence[Value], b: Sequence[Value], rules: Rules) -> bool:
    if len(a) != len(b):
        return False
    a, b = _shared_name(a), _shared_name(b)
    left = list(b)
    for value in a:
        found = next((i for i, other in enumerate(left) if same(value, other, rules)), None)
        if found is None:
            return False
        del left[found]
    return True


def _shared_name(items: Sequence[Value]) -> Sequence[Value]:
    """`n = 4, 5, 6` and `x = 1 or x = 2` are lists of values of one name."""
    names = {item.name for item in items if isinstance(item, Named)}
    if len(names) != 1:
        return items
    return [item.value if isinstance(item, Named) else item for item in items]


def _system_is(system: Listing, point: Bracket, rules: Rules) -> bool:
    """`x = 1, y = 2` is the point (1, 2): the names in alphabetical order."""
    named = [item for item in system.items if isinstance(item, Named)]
    if len(named) != len(system.items) or len({item.name for item in named}) < len(named):
        return False
    if (point.left, point.right) != ("(", ")"):
        return False
    return _in_order([item.value for item in sorted(named, key=lambda item: item.name)], point.items, rules)


def _same_set(a: RealSet, b: Value, rules: Rules) -> bool:
    try:
        left, right = _pieces(a.set), _pieces(as_set(b))
    except Unreadable:
        return False
    if isinstance(b, RealSet) and a.name and b.name and a.name != b.name:
        return False
    if left is None or right is None:
        return bool(a.set == as_set(b))
    return len(left) == len(right) and all(_same_piece(x, y, rules) for x, y in zip(left, right, strict=True))


def _same_union(a: RealSet, b: Listing, rules: Rules) -> bool:
    """`[0, 1] or [2, 3]` is the union of its intervals."""
    try:
        return _same_set(a, RealSet(sympy.Union(*(as_set(item) for item in b.items))), rules)
    except Unreadable:
        return False


def _pieces(found: Expr) -> list[Expr] | None:
    """The intervals and points of a set in order; None where it is not made of them."""
    if isinstance(found, sympy.Complement | sympy.Intersection):
        found = found.doit()
    parts = list(found.args) if isinstance(found, sympy.Union) else [found]
    pieces: list[Expr] = []
    for part in parts:
        if isinstance(part, sympy.FiniteSet):
            pieces += [sympy.FiniteSet(item) for item in part.args]
        elif isinstance(part, sympy.Interval) and part is not sympy.S.EmptySet:
            pieces.append(part)
        elif part is sympy.S.Reals:
            pieces.append(sympy.Interval.open(-sympy.oo, sympy.oo))
        else:
            return None
    return sorted(pieces, key=lambda piece: float(piece.inf))


def _same_piece(a: Expr, b: Expr, rules: Rules) -> bool:
    if isinstance(a, sympy.FiniteSet) or isinstance(b, sympy.FiniteSet):
        return type(a) is type(b) and _numbers(a.args[0], b.args[0], rules)
    return (
        bool(a.left_open == b.left_open and a.right_open == b.right_open)
        and _numbers(a.start, b.start, rules)
        and _numbers(a.end, b.end, rules)
    )


def _ratios(a: Ratio, b: Ratio) -> bool:
    if a.clock and b.clock:
        return a.clock == b.clock
    if len(a.parts) != len(b.parts) or any(x.is_zero for x in (*a.parts, *b.parts)):
        return a.parts == b.parts
    return all(identical(x * b.parts[0], y * a.parts[0]) for x, y in zip(a.parts, b.parts, strict=True))


def _ratio_is(ratio: Ratio, number: Scalar, rules: Rules) -> bool:
    if ratio.clock[-1:] in {"a", "p"} or len(ratio.parts) != 2 or ratio.parts[1] == 0 or number.unit:
        return False
    return (not ratio.clock or len(ratio.clock) < 4) and _numbers(ratio.parts[0] / ratio.parts[1], number.expr, rules)


def _numerator(expr: Expr) -> Expr:
    return sympy.together(expr).as_numer_denom()[0]


def _inequalities(a: Inequality, b: Inequality) -> bool:
    if len(a.parts) != len(b.parts):
        return False
    left = list(b.parts)
    for expr, strict in a.parts:
        found = next(
            (i for i, part in enumerate(left) if part[1] == strict and _proportional(expr, part[0], positive=True)),
            None,
        )
        if found is None:
            return False
        del left[found]
    return True


def _proportional(a: Expr, b: Expr, *, positive: bool = False) -> bool:
    """Whether a is a constant times b (a positive constant, if asked for)."""
    if a.free_symbols != b.free_symbols:
        return False
    for shift in range(8):
        primes = [sympy.Rational(sympy.prime(i + 4 + shift), 3 + shift) for i in range(len(a.free_symbols))]
        point = dict(zip(sorted(a.free_symbols, key=str), primes, strict=True))
        top, bottom = a.xreplace(point), b.xreplace(point)
        if bottom.is_zero or top.is_zero or not bottom.is_finite or not top.is_finite:
            continue
        factor = top / bottom
        return (not positive or bool(sympy.N(factor) > 0)) and identical(a, factor * b)
    return False
