"""JSON as models write it, read leniently and within bounds: nothing but `Bad` is ever raised."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_MAX_DEPTH = 64
_BLANK = re.compile(r"\s*")


class Bad(Exception):
    """Text that cannot be read; says why."""


class Finder:
    """Where things are in a text. Whoever asks from left to right looks at the text once for each, however often he
    asks: models that fall into a loop repeat a tag ten thousand times."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[str | re.Pattern[str], tuple[int, int]] = {}

    def find(self, needle: str, at: int) -> int:
        """The first place of `needle` at or after `at`; -1 where there is none."""
        known = self._lookup(needle, at)
        return self._keep(needle, at, self._text.find(needle, at)) if known is None else known

    def search(self, pattern: re.Pattern[str], at: int) -> int:
        """The same for a pattern that does not look behind itself."""
        known = self._lookup(pattern, at)
        if known is not None:
            return known
        match = pattern.search(self._text, at)
        return self._keep(pattern, at, -1 if match is None else match.start())

    def _lookup(self, what: str | re.Pattern[str], at: int) -> int | None:
        since, place = self._known.get(what, (at + 1, -1))
        return place if since <= at and (place < 0 or at <= place) else None

    def _keep(self, what: str | re.Pattern[str], at: int, place: int) -> int:
        self._known[what] = (at, place)
        return place


def skip(text: str, at: int) -> int:
    """Where the blanks at `at` end."""
    blank = _BLANK.match(text, at)
    return blank.end() if blank is not None else at


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:20]} is too large")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_constant)


def decode(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    at = skip(text, at)
    try:
        # Not in place: an error counts the lines up to itself, and places in it are the JSON's own this way.
        value, end = _DECODER.raw_decode(text[at:])
    except RecursionError:
        raise Bad("the JSON is nested too deeply") from None
    except ValueError as error:
        raise Bad(f"not valid JSON: {error}") from None
    _check(value, 0)
    return value, at + end


def _check(value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise Bad(f"the JSON is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Bad("a string holds half of a surrogate pair") from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _check(key, depth)
            _check(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, depth + 1)
