"""Units and remarks after a number: `12\\text{ cm}`, `\\$5`, `35 \\%`, `90^\\circ`, `3 million people`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.reward.symbolic.tokens import Token, Unreadable
from agentrl.reward.symbolic.words import CURRENCIES, NOT_A_REMARK, SCALES, UNITS


def split_unit(tokens: list[Token]) -> tuple[list[Token], str, int]:
    """The tokens without their unit; the unit's canonical name; the factor of a word such as "million"."""
    start = 1 if tokens[0].text == "-" else 0
    if len(tokens) > start + 1 and tokens[start].kind == "op" and tokens[start].text in CURRENCIES:
        symbol = tokens[start].text
        tokens, _, scale = split_unit(tokens[:start] + tokens[start + 1 :])
        return tokens, symbol, scale
    if len(tokens) > 1 and tokens[-1].kind == "op" and tokens[-1].text in CURRENCIES:
        return tokens[:-1], tokens[-1].text, 1
    end = len(tokens)
    while end > 0 and _in_unit(tokens, end):
        end -= 1
    words = [token.text.lower() for token in tokens[end:]]
    tokens = tokens[:end]
    scale = 1
    while words and words[0] in SCALES:
        scale *= SCALES[words.pop(0)]
    if not tokens:
        raise Unreadable("a unit without a number")
    if tokens[-1].kind == "op" and tokens[-1].text == "%" and not words:
        return tokens[:-1], "percent", scale
    if not words:
        return _degrees(tokens, scale)
    if set(words) & NOT_A_REMARK - {"per", "of", "the", "squared", "cubed"}:
        raise Unreadable(f"the words {' '.join(words)!r} after a number")
    names = _canonical(words)
    if words[:2] == ["per", "cent"]:
        names = ["percent"]
    if not any(word in UNITS for word in words):
        if tokens[-1].kind == "op" and tokens[-1].text == "%":  # `5\%\text{ increase}`
            return tokens[:-1], "percent", scale
        return tokens, "remark", scale
    return tokens, "percent" if names[0] == "percent" else " ".join(names), scale


def _canonical(words: list[str]) -> list[str]:
    """`square feet`, `sq ft` and `ft^2` are one unit; `miles per hour` is `mi/h`."""
    names = [UNITS.get(word, {"per": "/"}.get(word, word)) for word in words if word not in {"{", "}", "*"}]
    for word, power in (("square", "2"), ("square unit", "2"), ("cubic", "3")):
        while word in names[:-1]:
            at = names.index(word)
            names[at : at + 2] = [names[at + 1], "^", power]
    for word, power in (("squared", "2"), ("cubed", "3")):
        names = [part for name in names for part in (["^", power] if name == word else [name])]
    if names[:1] == ["degree"] and len(names) > 1:
        names = names[1:]
    known = {"mi / h": ["mph"], "km / h": ["kph"]}
    return known.get(" ".join(names), names)


def _in_unit(tokens: Sequence[Token], end: int) -> bool:
    token = tokens[end - 1]
    if token.kind == "word":
        return True
    before = [t.kind for t in tokens[:end] if t.kind == "word"]
    if not before:
        return False
    # The powers and quotients of a unit that is written as a word: `\text{cm}^2`, `\text{m}/\text{s}`.
    last_word = max(i for i, t in enumerate(tokens[:end]) if t.kind == "word")
    tail = "".join(t.text for t in tokens[last_word + 1 : end])
    follows = end < len(tokens) and tokens[end].kind == "word"
    return re.fullmatch(r"\^(\{?[23]\}?|\{|)|\^\{-?\d?\}?", tail) is not None or (tail in {"/", "*"} and follows)


def _degrees(tokens: list[Token], scale: int) -> tuple[list[Token], str, int]:
    texts = [token.text for token in tokens]
    for mark in (["^", "circ"], ["^", "{", "circ", "}"], ["circ"]):
        inside = tokens[: -len(mark)]
        if (
            texts[-len(mark) :] == mark
            and all(t.kind in {"num", "op"} or t.text in {"frac", "pm"} for t in inside)
            and inside
        ):
            return inside, "degree", scale
    return tokens, "", scale
