"""Stand-ins for a program that is elsewhere, and the tape of what it answered.

A call that is not on the tape is noted and raises `Pending`; from then on nothing of the tape is valid, because what
follows was answered in another order. A verdict needs a run in which every call was on the tape.
"""

from __future__ import annotations

import builtins
from typing import Any

from agentrl.reward.code.inside.plain import NotPlain, decode, encode

MOST_OPS = 20_000
_QUESTIONS = (
    "__len__",
    "__str__",
    "__repr__",
    "__bool__",
    "__hash__",
    "__getitem__",
    "__contains__",
    "__setitem__",
    "__delitem__",
)
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_OPERATORS = (
    *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__pow__", "__matmul__"),
    *("__and__", "__or__", "__xor__", "__neg__", *_COMPARISONS),
)


class Pending(BaseException):
    """The answer is not on the tape yet."""


class ProgramEnded(Exception):
    """The program was gone before it answered."""


class Tape:
    """The calls that this run makes, matched in order with those that were answered."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.recorded: list[Any] = request["ops"]
        self.answers: list[Any] = request["answers"]
        self.end: str = request["end"]
        self.kinds: dict[str, Any] = request["kinds"]
        self.ops: list[Any] = []
        self.live = True
        self.looking: list[dict[str, Any]] | None = None
        """While what is left of a statement is searched for calls: those of it that are noted already."""
        self.errors: dict[str, type[BaseException]] = {}

    def call(self, op: dict[str, Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The value that the program gave, or the error that it raised; Pending where it was not asked yet."""
        answer = self._ask({**op, "args": encode(list(args), _handle), "kwargs": encode(kwargs or {}, _handle)})
        if "error" in answer:
            raise self._error(answer["error"])
        if "args" in answer:
            _mend(args, decode(answer["args"]))
        return decode(answer["value"], self._lookup)

    def make(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Instance:
        """An object of a class that the test names, usable before the program has made it: one more call found."""
        place = len(self.ops)
        sent = {"args": encode(list(args), _handle), "kwargs": encode(kwargs, _handle)}
        try:
            answer = self._ask({"target": name, "keep": True, "make": True, **sent})
        except Pending:
            answer = {}
        if "error" in answer:
            raise self._error(answer["error"])
        return Instance(self, str(place), name)

    def _ask(self, op: dict[str, Any]) -> dict[str, Any]:
        place = len(self.ops)
        if place >= MOST_OPS:
            self.live = False
            raise Pending
        if self.looking is not None:
            if op in self.looking:
                raise Pending
            self.looking.append(op)
        self.ops.append(op)
        if not self.live or place >= len(self.recorded) or self.recorded[place] != op:
            self.live = False
            raise Pending
        if place >= len(self.answers):
            raise ProgramEnded(f"the program ended before it answered ({self.end})")
        answer: dict[str, Any] = self.answers[place]
        return answer

    def look(self, on: bool) -> None:
        """Begin or end the search of a statement that lacks an answer."""
        self.looking = self.ops[-1:] if on else None

    def _lookup(self, tag: str, content: Any) -> Any:
        if tag != "$object":
            raise ValueError(f"unknown tag {tag!r}")
        return Remote(self, str(content[0]), str(content[1]))

    def _error(self, error: dict[str, Any]) -> BaseException:
        text = str(error["text"])
        for name in error["names"]:
            if name in self.errors:
                return self.errors[name](text)
            found = getattr(builtins, str(name), None)
            if isinstance(found, type) and issubclass(found, Exception):
                try:
                    return found(text)
                except TypeError:
                    continue
        return RuntimeError(f"{error['names'][:1]}: {text}")


def _handle(value: Any) -> Any:
    if isinstance(value, Remote):
        return {"$handle": object.__getattribute__(value, "_handle")}
    if isinstance(value, Function):
        return {"$name": value.__name__}
    raise NotPlain(f"the test passes a {type(value).__name__}, which cannot be sent to the program")


def _mend(args: tuple[Any, ...], after: list[Any]) -> None:
    for mine, theirs in zip(args, after, strict=False):
        if type(mine) is not type(theirs):
            continue
        if isinstance(mine, (list, bytearray)):
            mine[:] = theirs
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(theirs)


class Function:
    """Stands for a function of the program."""

    def __init__(self, tape: Tape, name: str) -> None:
        self.tape = tape
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tape.call({"target": self.__name__, "keep": True}, args, kwargs)


class Awaited(Function):
    """Stands for an `async def` of the program: the answer is there at once, and awaited all the same."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ready(super().__call__(*args, **kwargs))


async def _ready(value: Any) -> Any:
    return value


class Remote:
    """Stands for an object that the program gave back where data could have been.

    It answers to no operator, so that no `__eq__` or `__lt__` of the program's decides over an assertion.
    """

    __hash__ = object.__hash__

    def __init__(self, tape: Tape, handle: str, kind: str) -> None:
        self._tape, self._handle, self._kind = tape, handle, kind

    def _send(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, **more: Any) -> Any:
        op = {"target": "", "object": self._handle, "name": name, "keep": True, **more}
        return self._tape.call(op, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"a {self._kind} of the program has no {name} here")
        kind = self._tape.kinds.get(self._kind, {})
        if name in kind.get("methods", ()):
            if name in kind["async"]:
                return lambda *args, **kwargs: _ready(self._send(name, args, kwargs))
            return lambda *args, **kwargs: self._send(name, args, kwargs)
        return self._send(name, get=True)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_tape", "_handle", "_kind"):
            object.__setattr__(self, name, value)
        else:
            self._send("__setattr__", (name, value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._send("__call__", args, kwargs)

    def __iter__(self) -> Any:
        return iter(self._send("__iter__"))

    def __enter__(self) -> Any:
        return self._send("__enter__")

    def __exit__(self, *exc: object) -> None:
        self._send("__exit__", (None, None, None))


class Instance(Remote):
    """Stands for an object that the test made of a class by name: the class is under test, operators and all."""

    __hash__ = object.__hash__


class Derived(Instance):
    """What an operator of such an object gave: it goes on to calculate, and is not compared with data."""

    __hash__ = object.__hash__


def _question(name: str) -> Any:
    return lambda self, *args: self._send(name, args)


def _operator(name: str) -> Any:
    def operate(self: Instance, *args: Any) -> Any:
        closed = name in ("__eq__", "__ne__") or (name in _COMPARISONS and isinstance(self, Derived))
        if closed and not isinstance(args[0], Remote):
            return NotImplemented
        result = self._send(name, args)
        if isinstance(result, Remote):
            return Derived(result._tape, result._handle, result._kind)
        return result

    return operate


for _name in _QUESTIONS:
    if _name != "__hash__":
        setattr(Instance, _name, _question(_name))
for _name in _OPERATORS:
    setattr(Instance, _name, _operator(_name))


def stand_in(tape: Tape, name: str) -> Any:
    """What a test gets that imports `name` from the program."""
    kind = tape.kinds.get(name, {"kind": "value"})
    if kind["kind"] == "function":
        return Awaited(tape, name) if kind["async"] else Function(tape, name)
    if kind["kind"] == "error":
        bases = tuple(stand_in(tape, base) if base in tape.kinds else getattr(builtins, base) for base in kind["bases"])
        if name not in tape.errors:
            tape.errors[name] = type(name, bases or (Exception,), {"__init__": BaseException.__init__})
        return tape.errors[name]
    if kind["kind"] == "class":
        return type(name, (_Class,), {"_tape": tape, "_methods": kind["methods"]})
    value = tape.call({"target": name, "keep": True, "get": True})
    return Function(tape, name) if isinstance(value, Remote) else value


class _Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._tape.make(cls.__name__, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        tape, methods = type.__getattribute__(cls, "_tape"), type.__getattribute__(cls, "_methods")
        if name in methods:
            return Function(tape, f"{cls.__name__}:{name}")
        return tape.call({"target": f"{cls.__name__}:{name}", "keep": True, "get": True})

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, Remote) and value._kind == cls.__name__


class _Class(metaclass=_Meta):
    """Stands for a class of the program: calling it makes an `Instance`."""
