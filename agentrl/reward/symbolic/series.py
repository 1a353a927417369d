"""Sums and products, and matrices: constructs of several parts, read with the parser's help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy

from agentrl.reward.symbolic.arithmetic import number
from agentrl.reward.symbolic.tokens import Unreadable
from agentrl.reward.symbolic.values import Bracket, Expr, Matrix

if TYPE_CHECKING:
    from agentrl.reward.symbolic.expression import Parser

MOST_TERMS = 1000
"""A sum of more terms is not worked out."""


def series(parser: Parser, name: str) -> Expr:
    r"""What follows `\sum` or `\prod`: `_{k=1}^{10}` and one term, whose `k` is bound, `i` and `e` too."""
    parser.expect("_")
    parser.expect("{")
    index = parser.take()
    if index.kind != "sym":
        raise Unreadable(f"\\{name} over {index.text!r}")
    parser.expect("=")
    first = number(parser.sum())
    parser.expect("}")
    parser.expect("^")
    last = parser.exponent()
    written = first.is_Integer and last.is_Integer
    if written and last - first >= MOST_TERMS:
        raise Unreadable(f"\\{name} of {last - first + 1} terms, at most {MOST_TERMS} are worked out")
    symbol = sympy.Dummy(index.text, integer=True)
    before, parser.bound = parser.bound, {**parser.bound, index.text: symbol}
    body = number(parser.term())
    parser.bound = before
    if not written:
        return _closed(name, body, (symbol, first, last))
    terms = [body.subs(symbol, at) for at in range(int(first), int(last) + 1)]
    result: Expr = sympy.Add(*terms) if name == "sum" else sympy.Mul(*terms)
    return result


def _closed(name: str, body: Expr, bounds: tuple[Expr, Expr, Expr]) -> Expr:
    """A sum or product to `n` or to infinity, where it has a closed form; letters in it are whole numbers, n >= 1."""
    whole = {
        s: sympy.Dummy(str(s), integer=True, positive=True) for s in bounds[1].free_symbols | bounds[2].free_symbols
    }
    back = {dummy: symbol for symbol, dummy in whole.items()}
    bounds = (bounds[0], bounds[1].subs(whole), bounds[2].subs(whole))
    summed: Expr = (sympy.Sum if name == "sum" else sympy.Product)(body.subs(whole), bounds).doit()
    if summed.has(sympy.Sum, sympy.Product, sympy.oo, sympy.zoo, sympy.nan, sympy.Piecewise):
        raise Unreadable(f"\\{name} from {bounds[1]} to {bounds[2]} without a closed form")
    return summed.subs(back)


def matrix(parser: Parser, environment: str) -> Any:
    """The rows of a matrix up to its end; the determinant of a `vmatrix`."""
    if environment not in {"pmatrix", "bmatrix", "matrix", "Bmatrix", "vmatrix", "smallmatrix", "array"}:
        raise Unreadable(f"the environment {environment!r}")
    if environment == "array" and parser.is_op("{"):
        while not parser.is_op("}"):
            parser.take()
        parser.take()
    rows: list[list[Expr]] = [[]]
    while not parser.is_cmd(f"end:{environment}"):
        if parser.is_op("\\\\"):
            parser.take()
            rows.append([])
        elif parser.is_op("&"):
            parser.take()
        else:
            rows[-1].append(number(parser.sum()))
    parser.take()
    rows = [row for row in rows if row]
    if not rows or len({len(row) for row in rows}) > 1:
        raise Unreadable("a matrix with rows of different lengths")
    if environment == "vmatrix":
        return sympy.Matrix(rows).det()
    return Matrix(tuple(tuple(row) for row in rows))


def transposed(parser: Parser, value: Bracket | Matrix) -> Matrix:
    r"""What `^T` or `^\top` makes of a matrix, or of a row written `(1, 2)`."""
    parser.expect("^")
    closed = parser.is_op("{") and parser.take() is not None
    mark = parser.take()
    if closed:
        parser.expect("}")
    if mark.text not in {"T", "top", "t", "intercal"}:
        raise Unreadable(f"a matrix to the power {mark.text!r}")
    rows = value.rows if isinstance(value, Matrix) else (tuple(number(item) for item in value.items),)
    return Matrix(tuple(zip(*rows, strict=True)))
