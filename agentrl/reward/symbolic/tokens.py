"""From an answer's text, LaTeX or plain, to tokens."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from agentrl.reward.symbolic.spelling import plain
from agentrl.reward.symbolic.words import (
    BLANK,
    CONSTANTS,
    FONTS,
    FUNCTIONS,
    GREEK,
    LINKS,
    SAME,
    SCALES,
    SHORT_TEXT,
    SHORT_UNITS,
)

LONGEST = 4000
"""Characters of an answer; longer ones are not read."""
MOST_DIGITS = 1000


class Unreadable(Exception):
    """The text is not understood; the message says at what."""


class Token(NamedTuple):
    """`kind` is num, sym, cmd, word or op; a number's text is what `fractions.Fraction` reads."""

    kind: str
    text: str
    spaced: bool = False


_NUMBER = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+(?![\w.]))?")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?(?!,\d)")
_BRACED = re.compile(r"\d+(?:\{,\}\d+)+(?:\.\d+)?")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?|(\d+)\.(\d*)\((\d+)\)(?!\d)")
_DOTTED = re.compile(r"(\d*)\.(\d*)(\\dot\s*\{?\d\}?\d*\\dot\s*\{?\d\}?)")
_GOES_ON = re.compile(r"(\d+)\.(\d+)\s*(?:\.\.\.|\\l?dots(?![a-z])|\\cdots)")
_MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,/^!])")


def tokenize(text: str, *, grouped: bool = True) -> list[Token]:
    """The tokens of `text`; Unreadable where a character has no meaning.

    `grouped`: a bare `1,234` outside brackets is one number, otherwise a list of two.
    """
    if len(text) > LONGEST:
        raise Unreadable(f"{len(text)} characters, at most {LONGEST} are read")
    return _Lexer(plain(text), grouped).run()


class _Lexer:
    def __init__(self, text: str, grouped: bool, *, prose: bool = False) -> None:
        self.text, self.grouped, self.prose = text, grouped, prose
        self.at, self.depth = 0, 0
        self.units = False
        self.spaced = False
        self.tokens: list[Token] = []

    def run(self) -> list[Token]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char.isspace() or char == "~":
                self.spaced, self.at = True, self.at + 1
            elif char.isdigit() or (char == "." and self.text[self.at + 1 : self.at + 2].isdigit()):
                self._number()
            elif char == "\\":
                self._command()
            elif char.isascii() and char.isalpha():
                self._letters()
            else:
                self._operator(char)
        return self.tokens

    def _put(self, kind: str, text: str) -> None:
        self.tokens.append(Token(kind, text, self.spaced))
        self.spaced = False

    def _number(self) -> None:
        if found := _DOTTED.match(self.text, self.at):
            value = _repeating(found[1], found[2], re.sub(r"\D", "", found[3]))
        elif found := _REPEATING.match(self.text, self.at):
            whole, head, tail = (found[1], found[2], found[3]) if found[3] else (found[4], found[5], found[6])
            value = _repeating(whole, head, tail)
        elif found := _GOES_ON.match(self.text, self.at):
            value = _shown(found)
        elif found := _MIXED.match(self.text, self.at):
            whole, top, bottom = (int(_limited(part)) for part in found.groups())
            if not 0 < top < bottom:
                raise Unreadable(f"{found[0]!r} is no mixed number")
            value = str(whole + Fraction(top, bottom))
        elif found := _BRACED.match(self.text, self.at):
            groups = found[0].split(".")[0].split("{,}")
            thousands = all(len(group) == 3 for group in groups[1:]) and len(groups[0]) <= 3
            if not thousands and (len(groups) > 2 or "." in found[0]):
                raise Unreadable(f"{found[0]!r} is no number")
            value = found[0].replace("{,}", "" if thousands else ".")
        elif self.grouped and self.depth == 0 and (found := _GROUPED.match(self.text, self.at)):
            value = found[0].replace(",", "")
        else:
            found = _NUMBER.match(self.text, self.at)
            assert found is not None
            value = found[0].rstrip(".") if found[0].endswith(".") else found[0]
        self.at = found.end()
        self._put("num", _limited(value))

    def _command(self) -> None:
        found = re.compile(r"\\([A-Za-z]+\*?|.)", re.DOTALL).match(self.text, self.at)
        if found is None:
            raise Unreadable("a backslash at the end")
        name = SAME.get(found[1], found[1])
        start, self.at = self.at, found.end()
        if name in BLANK:
            self.spaced = True
            # `\left.` and `\right.` are invisible brackets.
            if name in {"left", "right"} and self.text[self.at : self.at + 1] == ".":
                self.at += 1
        elif name in FONTS:
            self._font(name)
        elif name in {"begin", "end"}:
            content = self._group()
            self._put("cmd", f"{name}:{content.rstrip('*')}")
        elif name == "mathbb":
            self._put("cmd", "set:" + self._group())
        elif name in {"{", "}", "(", ")", "[", "]"}:
            brace = name in "{}"
            self._bracket("\\" + name if brace else name)
        elif name == "\\":
            self._put("op", "\\\\")
        elif name in {"or", "and", "not"}:
            self._put("word", name)
        elif (len(name) == 1 and not name.isalpha()) or name in {"$", "#", "&", "£", "€", "¥"}:
            self._put("op", name)
        elif name in {"e", "i"} and found[1] != name:
            self._put("sym", name)
        else:
            if self.at == start:
                raise Unreadable("an empty command")
            self._put("cmd", name)

    def _font(self, name: str) -> None:
        content = self._group()
        inner = _Lexer(content, self.grouped, prose=True)
        inner.depth = self.depth
        # `5\text{ m}` is a unit, where `5m` is a product.
        last = self.tokens[-1] if self.tokens else None
        after_group = last is not None and last.text == "}" and (name == "text" or content[:1] in {" ", "~"})
        inner.units = last is not None and (last.kind == "num" or after_group)
        inner.units = inner.units and content.strip() not in {"e", "i", "x", "d"}
        found = inner.run()
        if found:
            found[0] = found[0]._replace(spaced=True)
        self.tokens += found
        self.spaced = True

    def _group(self) -> str:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if self.text[self.at : self.at + 1] != "{":
            if self.at >= len(self.text):
                raise Unreadable("a command without its argument")
            self.at += 1
            return self.text[self.at - 1]
        depth, start = 0, self.at + 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 1
            depth += (char == "{") - (char == "}")
            self.at += 1
            if depth == 0:
                return self.text[start : self.at - 1]
        raise Unreadable("a brace that is not closed")

    def _letters(self) -> None:
        found = re.compile(r"[A-Za-z]+").match(self.text, self.at)
        assert found is not None
        run = found[0]
        lower = run.lower()
        self.at = found.end()
        after_number = bool(self.tokens) and self.tokens[-1].kind == "num"
        if run in CONSTANTS:
            self._put("cmd", CONSTANTS[run])
        elif run in FUNCTIONS and not (run == "min" and after_number):
            self._put("cmd", run)
        elif lower in FUNCTIONS | CONSTANTS.keys() and len(run) > 2 and run.istitle():
            self._put("cmd", CONSTANTS.get(lower, lower))
        elif run in GREEK:
            self._put("cmd", run)
        elif (
            (self.units and len(run) == 1) or lower in LINKS | SCALES.keys() or self._is_word(run, lower, after_number)
        ):
            self._put("word", run)
        elif (split := re.fullmatch(r"(sqrt|ln|sin|cos|tan|log|exp)([a-z])", run)) is not None:
            self._put("cmd", split[1])
            self._put("sym", split[2])
        else:
            for letter in run:
                self._put("sym", letter)

    def _is_word(self, run: str, lower: str, after_number: bool) -> bool:
        if len(run) > 1 and (self.prose or len(run) >= 4 or lower in SHORT_TEXT):
            return True
        return after_number and lower in SHORT_UNITS

    def _bracket(self, char: str) -> None:
        self.depth += 1 if char in {"(", "[", "\\{"} else -1
        self._put("op", char)

    def _operator(self, char: str) -> None:
        pair = self.text[self.at : self.at + 2]
        if pair in {"**", "<=", ">=", "!=", "==", "=<", "=>"}:
            self.at += 2
            if pair in {"=<", "=>"}:
                raise Unreadable(f"{pair!r} is no relation")
            kind, text = {"**": ("op", "^"), "<=": ("cmd", "le"), ">=": ("cmd", "ge"), "!=": ("cmd", "ne")}.get(
                pair, ("op", "=")
            )
            self._put(kind, text)
            return
        self.at += 1
        if char == "." and self.prose and self.tokens and self.tokens[-1].kind == "word":
            self.spaced = True  # an abbreviation's
        elif char in "()[]":
            self._bracket(char)
        elif char in "+-*/^_{}|,;:=<>!%'&$€£¥₹":
            self._put("op", char)
        else:
            raise Unreadable(f"the character {char!r}")


def _repeating(whole: str, head: str, tail: str) -> str:
    value = Fraction(int(_limited(whole or "0") + head or "0"), 10 ** len(head))
    value += Fraction(int(_limited(tail)), (10 ** len(tail) - 1) * 10 ** len(head))
    return str(value)


def _shown(found: re.Match[str]) -> str:
    """`0.333…` is a third: digits that go on are exact where they are seen to repeat."""
    seen = re.fullmatch(r"(\d*?)((\d{1,6}?)\3+)", found[2])
    if seen is None or len(seen[2]) < 3:
        raise Unreadable(f"{found[0]!r} goes on, and does not say how")
    return _repeating(found[1], seen[1], seen[3])


def _limited(number: str) -> str:
    mantissa, _, exponent = number.lower().partition("e")
    if len(mantissa) > MOST_DIGITS or (exponent and abs(int(exponent)) > MOST_DIGITS):
        raise Unreadable(f"a number of more than {MOST_DIGITS} digits")
    return number
