"""Runs a candidate's program and answers calls of it. Runs in a box that holds nothing worth stealing.

The request names calls, not what they should give. Each session is a fresh process: it loads the program and makes the
session's calls in order. Whatever the program does to this process, its parent or its channel, all that can leave here
is data that claims to be the calls' results, and that is compared elsewhere.

    {"program", "sessions": [[op, …], …], "seconds", "bytes"}  →  one line a session:
    {"answers": [{"value"}, {"error"}, …], "end": "done" | "timeout" | "flood" | "died", "code"}

An op is `{"target": "f" | "Class.method" | "Class:attribute", "args", "kwargs"}`, or `{"object": handle, "name", …}`
for an object of an earlier answer; `keep` allows answers that are objects, `make` names the answer by the op's number,
and `get` reads instead of calling.
"""

from __future__ import annotations

import inspect
import json
import linecache
import operator
import os
import select
import signal
import sys
import time
import traceback
import types
from typing import Any

from agentrl.reward.code.inside.plain import NotPlain, decode, encode, plainer

_BUILTINS: dict[str, Any] = {
    "__len__": len,
    "__str__": str,
    "__repr__": repr,
    "__bool__": bool,
    "__iter__": list,
    "__hash__": hash,
}


def main(request: dict[str, Any]) -> None:
    """Answer a request, a line a session, as soon as each is over."""
    budget = request["bytes"]
    for ops in request["sessions"]:
        result = run_session(request["program"], ops, request["seconds"], budget)
        budget -= result.pop("size")
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def run_session(program: str, ops: list[Any], seconds: float, budget: int) -> dict[str, Any]:
    """One process for the program and these calls; it is gone when this returns."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            os.setsid()
            play(program, ops, write_end)
        finally:
            os._exit(70)
    os.close(write_end)
    data, end = _collect(read_end, time.monotonic() + seconds, budget)
    os.close(read_end)
    code = _reap(child, end)
    answers, place = [], 0
    for line in data.split(b"\n"):
        if line and place < len(ops) + 1:
            try:
                answers.append(json.loads(line))
            except ValueError:
                break
            place += 1
    if end == "done" and len(answers) < len(ops):
        end = "died"
    return {"answers": answers[: len(ops)], "end": end, "code": code, "size": len(data)}


def _collect(channel: int, deadline: float, budget: int) -> tuple[bytes, str]:
    data = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return bytes(data), "timeout"
        if not select.select([channel], [], [], left)[0]:
            continue
        piece = os.read(channel, 1 << 16)
        if not piece:
            return bytes(data), "done"
        data += piece
        if len(data) > budget:
            return b"", "flood"


def _reap(child: int, end: str) -> int:
    # A program that closed its channel and goes on running is over too.
    for _ in range(20 if end == "done" else 0):
        if (found := os.waitpid(child, os.WNOHANG))[0]:
            _kill_group(child)
            return os.waitstatus_to_exitcode(found[1])
        time.sleep(0.005)
    _kill_group(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill_group(group: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def play(program: str, ops: list[Any], channel: int) -> None:
    """In the session's process: load the program, make the calls, write an answer a line."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.set_int_max_str_digits(0)
    kept: dict[str, Any] = {}
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    linecache.cache["solution.py"] = (len(program), None, program.splitlines(True), "solution.py")
    failure = None
    try:
        exec(compile(program, "solution.py", "exec"), module.__dict__)
    except BaseException as error:  # the border between the program and its caller, as below
        failure = _failure(error)
    for number, op in enumerate(ops):
        answer = failure or _answer(module, op, number, kept)
        _write(channel, (json.dumps(answer) + "\n").encode())
    os._exit(0)


def _write(channel: int, data: bytes) -> None:
    while data:
        data = data[os.write(channel, data) :]


def _answer(module: types.ModuleType, op: dict[str, Any], number: int, kept: dict[str, Any]) -> dict[str, Any]:
    def keep(value: Any) -> Any:
        if not op.get("keep"):
            return encode(plainer(value))
        handle = f"{number}.{len(kept)}"
        kept[handle] = value
        return {"$object": [handle, type(value).__name__, callable(value)]}

    def lookup(tag: str, content: Any) -> Any:
        return kept[content] if tag == "$handle" else getattr(module, content)

    try:
        args, kwargs = decode(op.get("args", []), lookup), decode(op.get("kwargs", {}), lookup)
        before = json.dumps(op.get("args", []))
        value = _perform(module, op, args, kwargs, kept)
        if inspect.iscoroutine(value):
            import asyncio  # it costs a session 50 ms

            value = asyncio.run(value)
        answer = {"value": encode(value, keep)}
        if op.get("make"):
            kept[f"{number}"] = value
            answer = {"value": None}
        after = _arguments(args, op)
        return answer if after is None or json.dumps(after) == before else {**answer, "args": after}
    except BaseException as error:
        return _failure(error)


def _arguments(args: list[Any], op: dict[str, Any]) -> Any:
    # Only what the caller can see change: lists, dictionaries and sets that were plain data.
    if not op.get("keep"):
        return None
    try:
        return encode(args)
    except (NotPlain, RecursionError):
        return None


def _perform(
    module: types.ModuleType, op: dict[str, Any], args: list[Any], kwargs: dict[str, Any], kept: dict[str, Any]
) -> Any:
    if "object" in op:
        target = kept[op["object"]]
        if op["name"] in _BUILTINS:
            return _BUILTINS[op["name"]](target, *args)
        if op["name"].startswith("__") and hasattr(operator, op["name"]) and op["name"] != "__call__":
            return getattr(operator, op["name"])(target, *args)
        if op["name"] == "__call__":
            return target(*args, **kwargs)
        target = getattr(target, op["name"])
    else:
        # `Solution.f` is a method of a fresh object, `Solution:f` an attribute of the class.
        path, _, attribute = op["target"].partition(":")
        first, *rest = path.split(".")
        if not op.get("keep") and not hasattr(module, first):
            first, *rest = rest or ["Solution", first]  # a method written as a function, or the other way round
        target = getattr(module, first)
        for name in rest:
            target = getattr(target() if isinstance(target, type) else target, name)
        target = getattr(target, attribute) if attribute else target
    return target if op.get("get") else target(*args, **kwargs)


def _failure(error: BaseException) -> dict[str, Any]:
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)[:2000]
        trace = "".join(traceback.format_exception(error)[-3:])[-2000:]
    except BaseException:
        text, trace = "", names[0]
    return {"error": {"names": names, "text": text, "trace": trace}}
