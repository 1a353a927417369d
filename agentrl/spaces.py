"""Gymnasium's spaces as text: what a model is told, how an observation is written, how an action is read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_shared_memory

from agentrl.errors import ContractError

LARGEST = 256
"""Numbers of one observation that are written out; more is no text."""
_INTEGER = re.compile(r"(?:(?<![\w.])-)?(?<![\d.])\d+(?!\d|\.\d)")
"""A whole number: not the parts of `1.5`, and `3-5` has no -5."""
_SEARCHED = 8_000
"""Characters at the end of an answer in which JSON is looked for."""


class AnyText(spaces.Text):
    """Every text up to `max_length` characters: blanks, line breaks, all of Unicode, and the empty one.

    Gymnasium's own `Text` holds letters and digits unless it is given a set of characters.
    """

    def __init__(self, max_length: int = 1_000_000, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length, min_length=0, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether it is a text, and not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short random text."""
        letters = "abcdefghijklmnopqrstuvwxyz0123456789 .,?\n北😀é"
        length = int(self.np_random.integers(0, min(24, self.max_length) + 1))
        return "".join(letters[int(i)] for i in self.np_random.integers(0, len(letters), length))

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]


@create_shared_memory.register(AnyText)
def _not_shared(space: AnyText, n: int = 1, ctx: Any = None) -> Any:
    raise gymnasium.error.CustomSpaceError(
        'texts are not kept in shared memory: make_vec(…, vectorization_mode="async", '
        'vector_kwargs={"shared_memory": False})'
    )


def instruction(space: spaces.Space[Any], names: Sequence[str] = ()) -> str:
    """What a model must know to answer with a member of `space`; nothing for plain text.

    ContractError where members cannot be written as text, or `names` do not fit.
    """
    if isinstance(space, spaces.Text):
        return ""
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start) + int(space.n) - 1
        if not names:
            return f"Answer with a whole number from {first} to {last}."
        if len(names) != int(space.n):
            raise ContractError(
                f"{len(names)} names {tuple(names)} for {int(space.n)} actions: name each one, in order"
            )
        return f"Answer with one of: {', '.join(names)}."
    return f"Answer with JSON: {_form(space)}."


def _form(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Text):
        return "a text"
    if isinstance(space, spaces.Discrete):
        return f"a whole number from {int(space.start)} to {int(space.start) + int(space.n) - 1}"
    if isinstance(space, spaces.Box):
        low, high = float(np.min(space.low)), float(np.max(space.high))
        return f"a list of shape {list(space.shape)} of numbers from {low:g} to {high:g}"
    if isinstance(space, spaces.MultiBinary):
        return f"a list of shape {list(space.shape)} of 0 and 1"
    if isinstance(space, spaces.MultiDiscrete):
        return f"a list of whole numbers, each from 0, below {space.nvec.tolist()}"
    if isinstance(space, spaces.Tuple):
        return f"a list of [{'; '.join(_form(inner) for inner in space.spaces)}]"
    if isinstance(space, spaces.Dict):
        return "an object with " + "; ".join(f"{json.dumps(name)}: {_form(inner)}" for name, inner in space.items())
    if isinstance(space, spaces.Sequence):
        return f"a list, of any length, of: {_form(space.feature_space)}"
    raise ContractError(f"{space} cannot be written as text: wrap the environment so that it has another action space")


def written(space: spaces.Space[Any], value: Any) -> str:
    """A member of `space` as text: texts as they are, everything else as JSON.

    ContractError where it is too large to be read: define `describe`.
    """
    if isinstance(value, str):
        return value
    return json.dumps(_plain(space, value))


def _plain(space: spaces.Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {str(name): _plain(inner, value[name]) for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return [_plain(inner, item) for inner, item in zip(space.spaces, value, strict=True)]
    if isinstance(space, spaces.Sequence):
        return [_plain(space.feature_space, item) for item in value]
    if isinstance(space, spaces.Text):
        return str(value)
    if not isinstance(space, spaces.Discrete | spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        raise ContractError(f"an observation of {space} is no text: define `describe` in a subclass of GymEnv")
    array = np.asarray(value)
    if array.size > LARGEST:
        raise ContractError(
            f"an observation of shape {array.shape} has {array.size} numbers, at most {LARGEST} are written: define "
            "`describe` in a subclass of GymEnv"
        )
    if array.dtype.kind == "f":
        array = np.round(array.astype(np.float64), 4)
    return array.tolist()


def read(space: spaces.Space[Any], text: str, names: Sequence[str] = ()) -> Any:
    """The member of `space` that an answer names; ValueError, readable for a model, where there is none.

    Of a Discrete space it is the last name, or the last whole number, in the answer; of others the last piece of JSON.
    """
    if isinstance(space, spaces.Text):
        return _member(space, text)
    if isinstance(space, spaces.Discrete):
        return _chosen(space, text, names)
    return _member(space, _value(space, _json(text)))


def _chosen(space: spaces.Discrete, text: str, names: Sequence[str]) -> Any:
    if names:
        pattern = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in sorted(names, key=len, reverse=True))
        found = re.findall(pattern, text, re.IGNORECASE)
        if not found:
            raise ValueError(f"There is no action in {_cut(text)}.")
        lower = [name.lower() for name in names]
        return space.start + space.dtype.type(lower.index(found[-1].lower()))
    numbers = _INTEGER.findall(text)
    if not numbers:
        raise ValueError(f"There is no number in {_cut(text)}.")
    if len(numbers[-1]) > 18:
        raise ValueError(f"{_cut(numbers[-1])} is not allowed.")
    return _member(space, int(numbers[-1]))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    tail, at, found = text[-_SEARCHED:], 0, []
    decoder = json.JSONDecoder()
    while (opening := re.compile(r"[\[{]").search(tail, at)) is not None:
        try:
            value, at = decoder.raw_decode(tail, opening.start())
            found.append(value)
        except ValueError:
            at = opening.end()
        except RecursionError:  # brackets without end
            break
    if not found:
        raise ValueError(f"There is no JSON in {_cut(text)}.")
    return found[-1]


def _value(space: spaces.Space[Any], given: Any) -> Any:
    try:
        if isinstance(space, spaces.Dict):
            return {name: _value(inner, given[name]) for name, inner in space.items()}
        if isinstance(space, spaces.Tuple | spaces.Sequence) and not isinstance(given, list):
            raise TypeError("a list is needed")
        if isinstance(space, spaces.Tuple):
            return tuple(_value(inner, item) for inner, item in zip(space.spaces, given, strict=True))
        if isinstance(space, spaces.Sequence):
            return tuple(_value(space.feature_space, item) for item in given)
        if isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
            array = np.array(given, dtype=space.dtype)
            if array.dtype.kind in "iu" and not np.array_equal(array, np.array(given)):
                raise ValueError("whole numbers are needed")
            return array.reshape(space.shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{_cut(json.dumps(given))} does not fit: {error}.") from error
    return given


def _member(space: spaces.Space[Any], value: Any) -> Any:
    if not space.contains(value):
        raise ValueError(f"{_cut(repr(value))} is not allowed.")
    return value


def _cut(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}…"
