"""Values as JSON and back: how data crosses from one box to another without any code crossing with it.

What JSON has no word for is an object with one key that starts with `$`: tuples, sets, bytes, complex numbers, large
integers, ranges, dictionaries with keys other than text. Decoding gives values of these types only, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_ITEMS = 100_000
"""Items of an iterator that are taken before it is given up."""
_JSON_INT = 2**53


class NotPlain(TypeError):
    """A value that is no data: an object with behaviour of its own, or one that does not end."""


Keep = Callable[[Any], Any]
"""What stands for a value that is no data; raises NotPlain where there is nothing."""


def refuse(value: Any) -> Any:
    """The `Keep` that keeps nothing."""
    raise NotPlain(f"a {type(value).__name__} is not plain data")


def encode(value: Any, keep: Keep = refuse) -> Any:
    """A value as JSON. Types are compared exactly: a subclass of `int` may behave as it likes and is no data."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_JSON_INT < value < _JSON_INT else {"$int": hex(value)}
    if kind is list:
        return [encode(item, keep) for item in value]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, keep) for key, item in value.items()}
        return {"$dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    return _encode_other(value, kind, keep)


def _encode_other(value: Any, kind: type, keep: Keep) -> Any:
    if kind is tuple:
        return {"$tuple": [encode(item, keep) for item in value]}
    if kind in (set, frozenset):
        return {"$" + kind.__name__: [encode(item, keep) for item in value]}
    if kind in (bytes, bytearray):
        return {"$bytes": value.hex()}
    if kind is complex:
        return {"$complex": [value.real, value.imag]}
    if kind is range:
        return {"$range": [value.start, value.stop, value.step]}
    if kind in (map, filter, zip, enumerate) or kind.__name__.endswith(("generator", "iterator")):
        return {"$iterator": [encode(item, keep) for item in _bounded(value)]}
    if kind.__name__ in ("dict_keys", "dict_values", "dict_items", "deque", "reversed"):
        return [encode(item, keep) for item in _bounded(value)]
    if kind.__name__ in ("Counter", "defaultdict", "OrderedDict") and kind.__module__ == "collections":
        return encode(dict(value), keep)
    if kind.__module__ == "numpy":
        return encode(value.tolist(), keep)
    return keep(value)


def plainer(value: Any) -> Any:
    """What an object is by its built-in base: a named tuple is a tuple; a Fraction is a number. NotPlain for others."""
    bases: tuple[tuple[type, Callable[[Any], Any]], ...] = (
        (tuple, lambda it: tuple(tuple.__iter__(it))),
        (list, lambda it: list(list.__iter__(it))),
        (dict, lambda it: dict(dict.items(it))),
        (set, lambda it: set(set.__iter__(it))),
        (int, lambda it: int.__add__(it, 0)),
        (float, lambda it: float.__mul__(it, 1.0)),
        (str, lambda it: str.__add__(it, "")),
    )
    for kind, plain in bases:
        if isinstance(value, kind):
            return plain(value)
    if type(value).__module__ in ("decimal", "fractions"):
        return int(value) if value == int(value) else float(value)
    raise NotPlain(f"the result holds a {type(value).__name__}, which is not plain data")


def _bounded(values: Any) -> Any:
    for number, item in enumerate(values):
        if number >= MOST_ITEMS:
            raise NotPlain(f"an iterator of more than {MOST_ITEMS} items")
        yield item


def decode(data: Any, lookup: Callable[[str, Any], Any] | None = None) -> Any:
    """The value that JSON data stand for. `lookup(tag, content)` reads tags that are not this module's.

    Raises ValueError for anything that `encode` does not write.
    """
    if isinstance(data, list):
        return [decode(item, lookup) for item in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if len(data) != 1 or not tag.startswith("$"):
        return {key: decode(item, lookup) for key, item in data.items()}
    try:
        return _decode_tag(tag, data[tag], lookup)
    except (TypeError, OverflowError, IndexError) as error:
        raise ValueError(f"{tag}: {error}") from error


def _decode_tag(tag: str, content: Any, lookup: Callable[[str, Any], Any] | None) -> Any:
    if tag == "$tuple":
        return tuple(decode(item, lookup) for item in content)
    if tag == "$set":
        return {decode(item, lookup) for item in content}
    if tag == "$frozenset":
        return frozenset(decode(item, lookup) for item in content)
    if tag == "$dict":
        return {decode(key, lookup): decode(item, lookup) for key, item in content}
    if tag == "$iterator":
        return iter([decode(item, lookup) for item in content])
    if tag == "$int":
        return int(content, 16)
    if tag == "$bytes":
        return bytes.fromhex(content)
    if tag == "$complex":
        return complex(float(content[0]), float(content[1]))
    if tag == "$range":
        return range(int(content[0]), int(content[1]), int(content[2]))
    if lookup is None:
        raise ValueError(f"unknown tag {tag!r}")
    return lookup(tag, content)
