"""The parser of expressions: what stands between the commas, brackets and relations of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from agentrl.reward.symbolic.arithmetic import (
    INVERSE,
    MANY,
    SETS,
    SIMPLE,
    binomial,
    combined,
    factorial,
    nonzero,
    number,
    power,
    product,
    unwrapped,
)
from agentrl.reward.symbolic.series import matrix, series, transposed
from agentrl.reward.symbolic.stream import Stream
from agentrl.reward.symbolic.tokens import Token, Unreadable
from agentrl.reward.symbolic.values import Braces, Bracket, Expr, Matrix, RealSet, Scalar, Value
from agentrl.reward.symbolic.words import FUNCTIONS, GREEK

DEEPEST = 120
"""Nested brackets, roots and fractions; deeper answers are not read."""

_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "|": "|"}


class Parser(Stream):
    """Reads a token list from left to right.

    `signs` says what each ± is, in order; `count` how many there were.
    """

    def __init__(self, tokens: Sequence[Token], signs: Sequence[int] = ()) -> None:
        super().__init__(tokens)
        self.signs = signs
        self.count = 0
        self.depth = 0
        self.bars = 0
        self.bound: dict[str, Expr] = {}
        """Letters that a sum around what is read stands for."""

    # -- sets

    def whole(self) -> Value:
        """A value: unions and differences of sets, or an expression."""
        left = self.part()
        while self.is_cmd("cup", "cap", "setminus") or (self.is_op("-") and isinstance(left, RealSet)):
            operation = self.take().text
            left = combined(operation, left, self.part())
        return left

    def part(self) -> Value:
        """One set, bracket or expression."""
        if self.is_cmd("emptyset"):
            self.take()
            return RealSet(sympy.S.EmptySet)
        if self.here.kind == "cmd" and self.here.text.startswith("set:"):
            name = self.take().text[4:]
            if name not in SETS:
                raise Unreadable(f"the set {name!r}")
            return RealSet(SETS[name])
        if self.is_op("\\{"):
            return self._braces()
        start = self.at
        value = self.sum()
        if isinstance(value, Bracket) and self.at - start < 2:
            raise Unreadable("an empty bracket")
        return value if isinstance(value, Bracket | Matrix) else Scalar(value)

    def _braces(self) -> Value:
        self.take()
        self.depth += DEEPEST // 5  # sets in sets are compared both ways: the work doubles with each
        self._deeper()
        items = self._items("\\}")
        self.depth -= DEEPEST // 5 + 1
        return Braces(items) if items else RealSet(sympy.S.EmptySet)

    def _items(self, *closing: str) -> tuple[Value, ...]:
        items: list[Value] = []
        while not self.is_op(*closing):
            items.append(self.whole())
            if not self.is_op(*closing):
                if not self.is_op(",", ";"):
                    raise Unreadable(f"expected a comma, found {self.here.text!r}")
                self.take()
        self.take()
        return tuple(items)

    # -- arithmetic

    def sum(self) -> Any:
        """Terms, added and subtracted; also a bracket of several values, or a matrix, that stands alone."""
        total = self._signed_term()
        while self.is_op("+", "-") or self.is_cmd("pm", "mp"):
            if isinstance(total, Bracket | Matrix):
                raise Unreadable("a sum of what is no number")
            total = total + number(self._signed_term())
        return total

    def _signed_term(self) -> Any:
        sign = 1
        signed = False
        while self.is_op("+", "-") or self.is_cmd("pm", "mp"):
            token = self.take()
            signed = True
            if token.text in {"pm", "mp"}:
                which = self.signs[self.count] if self.count < len(self.signs) else 1
                self.count += 1
                sign *= which if token.text == "pm" else -which
            elif token.text == "-":
                sign = -sign
        term = self.term()
        return product(sympy.Integer(sign), term) if signed else term

    def term(self) -> Any:
        """Factors, multiplied and divided."""
        value = self._factor()
        while True:
            if self.is_op("*"):
                self.take()
                value = product(value, self._signed_factor())
            elif self.is_op("/"):
                self.take()
                value = number(value) / nonzero(self._signed_factor())
            elif self.is_cmd("bmod"):
                self.take()
                value = sympy.Mod(number(value), nonzero(self._signed_factor()))
            elif self._starts_factor():
                value = product(value, self._factor())
            else:
                return value

    def _signed_factor(self) -> Any:
        negative = False
        while self.is_op("+", "-"):
            negative ^= self.take().text == "-"
        value = self._factor()
        return product(sympy.Integer(-1), value) if negative else value

    def _starts_factor(self) -> bool:
        token = self.here
        if token.kind == "sym":
            return True
        if token.kind == "num":  # side by side two numbers mean nothing, but for `3!2!`
            return self.at > 0 and self.tokens[self.at - 1].text == "!"
        if token.kind == "op":
            return (
                token.text in {"(", "{"} or (token.text == "[" and self.at > 0) or (token.text == "|" and not self.bars)
            )
        return token.kind == "cmd" and (
            token.text in _STARTS or token.text.startswith("begin:") or token.text in FUNCTIONS or token.text in GREEK
        )

    def _factor(self) -> Any:
        base = self.postfix(self.atom())
        while self.is_op("^"):
            if isinstance(base, Bracket | Matrix):
                return transposed(self, base)
            self.take()
            base = self.postfix(power(number(base), self.exponent()))
        return base

    def exponent(self) -> Expr:
        """What follows a `^`."""
        if self.is_op("+", "-"):
            negative = self.take().text == "-"
            value = self.exponent()
            return -value if negative else value
        base = number(self.atom())
        if self.is_op("^"):
            self.take()
            self._deeper()
            base = power(base, self.exponent())
            self.depth -= 1
        return base

    def postfix(self, value: Any) -> Any:
        """Factorials, percent and degree signs after a factor."""
        while True:
            if self.is_op("!"):
                self.take()
                twice = self.is_op("!") and self.take() is not None
                value = (sympy.factorial2 if twice else factorial)(number(value))
            elif self.is_op("%"):
                self.take()
                value = number(value) / 100
            elif self.is_op("^") and self._degree_mark():
                value = number(value) * sympy.pi / 180
            elif self.is_cmd("circ"):
                self.take()
                value = number(value) * sympy.pi / 180
            else:
                return value

    def _degree_mark(self) -> bool:
        if self.ahead() == Token("cmd", "circ", self.ahead().spaced):
            self.at += 2
            return True
        if (self.ahead().text, self.ahead(2).text, self.ahead(3).text) == ("{", "circ", "}"):
            self.at += 4
            return True
        return False

    # -- atoms

    def atom(self) -> Any:
        """A number, a symbol, a bracket, a command with its arguments."""
        self._deeper()
        token = self.take()
        if token.kind == "num":
            value: Any = self._mixed(token)
        elif token.kind == "sym":
            value = self.symbol(token.text)
        elif token.kind == "op" and token.text in _CLOSING:
            value = self._bracketed(token.text)
        elif token.kind == "cmd":
            value = self._command(token.text)
        else:
            raise Unreadable(f"{token.text!r} where a number should be")
        self.depth -= 1
        return value

    def _mixed(self, token: Token) -> Expr:
        value = sympy.Rational(token.text)
        if not (self.is_cmd("frac") and token.text.isdigit()):
            return value
        start, tokens = self.at, list(self.tokens)
        self.take()
        top, bottom = self.argument(), self.argument()
        used = self.tokens[start + 1 : self.at]
        plain = all(part.kind == "num" or part.text in "{}" for part in used)
        if plain and top.is_Integer and bottom.is_Integer and 0 < top < bottom:
            return value + sympy.Rational(top, bottom)
        self.at, self.tokens = start, tokens
        return value

    def symbol(self, letter: str) -> Expr:
        """A letter with its index and primes; `e` and `i` are the constants."""
        name = letter
        if self.is_op("_"):
            self.take()
            name += "_" + self._index()
        while self.is_op("'"):
            self.take()
            name += "'"
        constants = {"e": sympy.E, "i": sympy.I, **self.bound}
        return constants[name] if name in constants else sympy.Symbol(name)

    def _index(self) -> str:
        if not self.is_op("{"):
            return self.take().text
        self.take()
        parts = []
        while not self.is_op("}"):
            parts.append(self.take().text)
        self.take()
        return "".join(parts)

    def _bracketed(self, left: str) -> Any:
        if left == "|":
            self.bars += 1
            inner = number(self.sum())
            self.bars -= 1
            self.expect("|")
            return sympy.Abs(inner)
        if left == "\\{":
            raise Unreadable("a set where a number should be")
        bars, self.bars = self.bars, 0
        items = self._items("}") if left == "{" else self._items(")", "]")
        self.bars = bars
        right = self.tokens[self.at - 1].text
        if len(items) == 1 and _CLOSING[left] == right:
            return unwrapped(items[0])
        if left == "{" or not items:
            raise Unreadable("a bracket without a value")
        if len(items) == 1:
            raise Unreadable(f"{left!r} is closed by {right!r}")
        return Bracket(items, left, right)

    def argument(self) -> Expr:
        """A command's argument: a group, or the one digit, letter or command that follows."""
        token = self.here
        if token.kind == "num" and token.text.isdigit() and len(token.text) > 1:
            self.tokens[self.at] = Token("num", token.text[1:])
            return sympy.Integer(token.text[0])
        if token.kind == "num":
            return sympy.Rational(self.take().text)
        return number(self.atom())

    def _command(self, name: str) -> Any:
        if name == "pi":
            return sympy.pi
        if name == "infty":
            return sympy.oo
        if name == "frac":
            top = self.argument()
            return top / nonzero(self.argument())
        if name == "binom":
            return binomial(self.argument(), self.argument())
        if name in {"sum", "prod"}:
            return series(self, name)
        if name in {"sqrt", "cbrt"}:
            return self._root(name)
        if name in {"lfloor", "lceil"}:
            inner = number(self.sum())
            if not self.is_cmd("r" + name[1:]):
                raise Unreadable(f"{name} that is not closed")
            self.take()
            return sympy.floor(inner) if name == "lfloor" else sympy.ceiling(inner)
        if name.startswith("begin:"):
            return matrix(self, name[6:])
        if name in GREEK:
            return self.symbol(name)
        if name in FUNCTIONS:
            return self._function(name)
        raise Unreadable(f"the command {name!r}")

    def _root(self, name: str) -> Expr:
        index: Expr = sympy.Integer(3 if name == "cbrt" else 2)
        if name == "sqrt" and self.is_op("["):
            self.take()
            index = number(self.sum())
            self.expect("]")
        # A digit run is taken whole: who writes \sqrt12 means 12.
        digits = self.here.kind == "num"
        radicand = sympy.Rational(self.take().text) if digits else self.argument()
        if index.is_Integer and index.p % 2 == 1 and radicand.is_number and radicand.is_negative:
            return -power(-radicand, 1 / index)
        return power(radicand, 1 / nonzero(index))

    def _function(self, name: str) -> Expr:
        base: Expr | None = None
        exponent: Expr | None = None
        while self.is_op("_", "^") and not (self.is_op("^") and self.ahead().text == "circ"):
            if self.take().text == "_":
                base = self._base()
            elif exponent is None:
                exponent = self.exponent()
        if name in MANY:
            items = self._arguments()
            return MANY[name](*items)
        argument = self._function_argument()
        function = SIMPLE.get(name)
        if name in INVERSE and exponent == -1:
            function, exponent = INVERSE[name], None
        if name in {"log", "lg"}:
            base = sympy.Integer(10) if base is None else base
            value = sympy.log(argument) / sympy.log(base)
        elif function is None or (base is not None):
            raise Unreadable(f"the function {name!r}")
        else:
            value = function(argument)
        return value if exponent is None else power(value, exponent)

    def _base(self) -> Expr:
        """A logarithm's base: `\\log_28` is `\\log_2 8`, while `\\log_10 100` says what it means."""
        alone = self.ahead().kind in {"end", "op"} and self.ahead().text not in {"(", "|"}
        return self.argument() if self.here.kind != "num" or alone else sympy.Rational(self.take().text)

    def _arguments(self) -> list[Expr]:
        if not self.is_op("(", "\\{"):
            raise Unreadable("a function without brackets")
        closing = ")" if self.take().text == "(" else "\\}"
        return [number(unwrapped(item)) for item in self._items(closing)]

    def _function_argument(self) -> Expr:
        if self.is_op("(", "[", "{", "|"):
            value = number(self.postfix(self.atom()))
            # `\sin(x)^2` is read as the square of the sine: leave the power to the caller.
            return value
        sign = -1 if self.is_op("-") and self.take() else 1
        value = number(self._factor())
        while (
            self.here.kind == "sym"
            or self.is_cmd("pi", "frac", "sqrt")
            or (self.here.kind == "cmd" and self.here.text in GREEK)
        ):
            value = value * number(self._factor())
        if self.is_op("/") and self.ahead().kind == "num" and self.tokens[self.at - 1].text == "pi":
            self.take()
            value = value / nonzero(self._factor())
        return sign * value

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable(f"more than {DEEPEST} brackets in each other")


_STARTS = frozenset({"frac", "sqrt", "cbrt", "pi", "binom", "sum", "prod", "lfloor", "lceil", "infty"})
