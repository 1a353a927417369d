"""Answers that are no formulas: times of day, numerals with a base, offered choices, words."""

from __future__ import annotations

import re
from collections.abc import Callable

import sympy

from agentrl.reward.symbolic.tokens import Unreadable
from agentrl.reward.symbolic.values import Choice, Ratio, RealSet, Scalar, Text, Value
from agentrl.reward.symbolic.words import NOT_AN_ANSWER

_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_BASED = re.compile(r"\(?\s*([0-9A-Z]+)\s*\)?\s*_\s*\{?\s*(?:\\text\{)?\s*(\d+|[a-z]+)\s*\}?\s*\}?")
_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
}
_COUNTED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty"
)
_NUMERALS = {word: number for number, word in enumerate(_COUNTED.split())}
_SETS = {
    "no solution": sympy.S.EmptySet,
    "all real numbers": sympy.S.Reals,
    "all integers": sympy.S.Integers,
    "all positive integers": sympy.S.Naturals,
}
_WORDS = re.compile(r"\\?(?:text|textbf|mathrm|textit|mbox)\s*\{([^{}\\$]*)\}|([A-Za-z][A-Za-z'-]*)")
PHRASES = {
    **dict.fromkeys(
        (
            "no solution",
            "no solutions",
            "no real solution",
            "no real solutions",
            "there is no solution",
            "there are no solutions",
            "empty set",
            "the empty set",
        ),
        "no solution",
    ),
    "does not exist": "dne",
    "dne": "dne",
    "undefined": "undefined",
    "all real numbers": "all real numbers",
    "all reals": "all real numbers",
    "all integers": "all integers",
    "all positive integers": "all positive integers",
    "infinitely many": "infinitely many",
    "infinitely many solutions": "infinitely many",
    "infinite solutions": "infinitely many",
    "not possible": "impossible",
    "impossible": "impossible",
}


_ARC = re.compile(
    r"(\d+)\s*\^?\s*\{?\s*(?:\\circ|\\degree|°)\s*\}?\s*(\d+)\s*(?:'|’|′|\^\{?\\prime\}?)(?:\s*(\d+)\s*(?:''|″|\"))?"
)
_LETTER = re.compile(
    r"\(([a-e])\)|([A-J])[).:]|(?i:option|choice|answer)\s*:?\s*\(([A-Ja-e])\)|(?i:option|choice)\s*:?\s+([A-J])"
)
_STYLED = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*(?:\(([A-J])\)|([A-J])\s*[).:])[\s~]*(.*)", re.DOTALL
)
_OFFERED = re.compile(
    r"(?:\(([A-J])\)(?:\\[ ,;:!]|[\s~])*(?=\d|\\?\$)|([A-J])(?:[.)]|:(?=[\s~]))[\s~]*(?=[^A-Z\s)]))(.+)", re.DOTALL
)


def choice(text: str, read: Callable[[str], list[Value]]) -> Choice | None:
    """The offered answer that `text` names by its letter, alone or before the answer itself: `\\textbf{(B)}\\ 5`."""
    bare = re.sub(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", text).strip()
    if found := _LETTER.fullmatch(bare):
        return Choice("".join(letter for letter in found.groups() if letter).upper())
    if found := _STYLED.fullmatch(text):
        inside, closed, rest = found[3].partition("}")
        rest = rest if not inside.strip() else f"\\text{{{inside}{closed}{rest}"
    elif found := _OFFERED.fullmatch(text):
        rest = found[3]
    else:
        return None
    rest = re.sub(r"^(?:\\[,;:! ]|\\q?quad(?![a-z])|[~\s:.)])+", "", rest)
    letter = found[1] or found[2]
    if not rest:
        return Choice(letter)
    try:
        return Choice(letter, read(rest)[0])
    except Unreadable:
        return Choice(letter)


def in_words(phrase: str) -> Value:
    """What words stand for: a number, a set of numbers, or themselves."""
    if phrase in _NUMERALS:
        return Scalar(sympy.Integer(_NUMERALS[phrase]))
    return RealSet(_SETS[phrase]) if phrase in _SETS else Text(phrase)


def special(text: str) -> Value | None:
    """Clock times, numerals with a base, and answers in words."""
    plain = re.sub(r"\\text\{([^{}]*)\}|\\(?=[ ,;])|\\mathrm\{([^{}]*)\}", lambda m: m[1] or m[2] or " ", text).strip()
    if found := _CLOCK.fullmatch(re.sub(r"\s+", " ", plain)):
        suffix = (found[3] or "").lower()
        parts = (sympy.Integer(found[1]), sympy.Integer(found[2]))
        return Ratio(parts, f"{int(found[1])}:{found[2]}{suffix}")
    if found := _BASED.fullmatch(text):
        base = _BASES.get(found[2]) or (int(found[2]) if found[2].isdigit() else 0)
        single = len(found[1]) == 1 and found[1].isalpha()
        if not single and any(char.isdigit() for char in found[1]):
            if not 2 <= base <= 36:
                raise Unreadable(f"a numeral with the base {found[2]!r}")
            try:
                return Scalar(sympy.Integer(int(found[1], base)))
            except ValueError as error:
                raise Unreadable(f"{found[1]!r} has a digit that base {base} lacks") from error
    if found := _ARC.fullmatch(text):
        degrees, minutes, seconds = (sympy.Integer(part or 0) for part in found.groups())
        return Scalar(degrees + minutes / 60 + seconds / 3600, "degree")
    return _words(plain, text)


def _words(plain: str, text: str) -> Value | None:
    lowered = " ".join(plain.lower().split()).rstrip(".")
    if set(lowered.split()) & NOT_AN_ANSWER and lowered not in PHRASES:
        raise Unreadable(f"{text!r} is no answer")
    if lowered in PHRASES:
        return in_words(PHRASES[lowered])
    whole = _WORDS.fullmatch(text)
    if whole is not None and whole[1] is not None:
        words = whole[1].strip()
        # In \text{} up to five words are an answer in words; one letter, digits and functions are mathematics.
        if re.fullmatch(r"[A-Za-z][A-Za-z.' -]+", words) and 2 <= len(words.split()) <= 5:
            return Text(" ".join(words.lower().split()))
    return None
