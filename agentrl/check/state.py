"""What instances of an environment share, as far as it can change: classes, modules, defaults, common objects."""

from __future__ import annotations

import collections
import inspect
import random
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from agentrl.env import Env

_PLAIN = (int, str, float, bool, bytes, type(None), complex)
_MUTABLE = (list, dict, set, bytearray, collections.deque, random.Random)
_DEEPEST = 6


def fingerprint(value: Any, depth: int = 0) -> str | None:
    """Text that changes when plain data does; None for what is no plain data."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if depth > _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key!r}:{_inner(item, depth)}" for key, item in list(value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(_inner(item, depth) for item in value)) + "}"
    if isinstance(value, list | tuple | bytearray | collections.deque):
        return "[" + ",".join(_inner(item, depth) for item in list(value)) + "]"
    return None


def _inner(value: Any, depth: int) -> str:
    return fingerprint(value, depth + 1) or f"@{id(value)}"


def class_state(env_class: type[Env]) -> dict[str, str]:
    """The data attributes and the mutable defaults of the class and its bases, by dotted name."""
    found = {}
    for cls in _own(env_class):
        for name, value in list(vars(cls).items()):
            if name.startswith("__") or isinstance(value, classmethod | staticmethod | property):
                continue
            where = f"{cls.__name__}.{name}"
            if isinstance(value, FunctionType):
                defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
                if any(isinstance(default, _MUTABLE) for default in defaults):
                    found[f"a default of {where}"] = fingerprint(list(defaults)) or ""
                continue
            found[where] = fingerprint(value) or f"@{id(value)}"
    return found


def module_state(env_class: type[Env]) -> dict[str, str]:
    """The plain data of the modules that the class and its bases come from."""
    found = {}
    for cls in _own(env_class):
        module = sys.modules.get(cls.__module__)
        for name, value in list(vars(module).items()) if module else ():
            text = None if name.startswith("__") or isinstance(value, ModuleType | type) else fingerprint(value)
            if text is not None:
                found[f"{cls.__module__}.{name}"] = text
    return found


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names whose value is another one, or that are new."""
    return sorted(name for name, text in after.items() if before.get(name) != text)


def shared_objects(first: Env, second: Env) -> dict[str, Any]:
    """Mutable plain objects that both instances hold, by their path in the first."""
    theirs = {id(value) for _, value in _held(second, "self")}
    return {path: value for path, value in _held(first, "self") if id(value) in theirs}


def _held(env: Env, path: str) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [(f"{path}.{name}", value, 0) for name, value in vars(env).items()]
    while waiting:
        where, value, depth = waiting.pop()
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        if isinstance(value, Env):
            yield from _held(value, where)
        if isinstance(value, _MUTABLE):
            yield where, value
        if isinstance(value, dict):
            waiting += [(f"{where}[{key!r}]", item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list | tuple | collections.deque):
            waiting += [(f"{where}[{index}]", item, depth + 1) for index, item in enumerate(value)]


def global_random() -> tuple[int, ...]:
    """The state of the generators that a whole process shares; it moves when anybody draws from them."""
    found = [hash(random.getstate())]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        name, keys, position, *_ = numpy_random.get_state()
        found.append(hash((name, keys.tobytes(), position)))
    return tuple(found)


def _own(env_class: type[Env]) -> list[type]:
    return [cls for cls in inspect.getmro(env_class) if cls not in (Env, object)]
