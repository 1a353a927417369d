"""Sends the source of `inside/` into a box, runs one of its modules there, and reads the lines it prints."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from agentrl.sandbox.types import ExecResult, Sandbox

PYTHON = "python3"
# No environment of our own: every box has the same small one (UTC, C.UTF-8, hash seed 0), so that a program's output is
# repeatable, and a program that keeps to it runs as a fork of the box's warm interpreter.
_ROOM = "agentrl.reward.code.inside"
_MODULES = {
    "candidate": ("plain", "candidate"),
    "trial": ("plain", "tape", "shim", "trial"),
    "special": ("special",),
}
# The first line of standard input is the request with the sources; the working directory is not searched for modules.
_BOOT = f"""import sys
sys.path[:] = [p for p in sys.path if p]
import json, types
r = json.loads(sys.stdin.buffer.readline())
path = ""
for part in {_ROOM!r}.split("."):
    path = path + "." + part if path else part
    sys.modules[path] = types.ModuleType(path)
    sys.modules[path].__path__ = []
for name, source in r.pop("sources"):
    m = types.ModuleType({_ROOM!r} + "." + name)
    sys.modules[m.__name__] = m
    setattr(sys.modules[{_ROOM!r}], name, m)
    exec(compile(source, name + ".py", "exec"), m.__dict__)
m.main(r["request"])
"""


@cache
def _source(name: str) -> str:
    return resources.files(_ROOM).joinpath(f"{name}.py").read_text(encoding="utf-8")


async def run_inside(box: Sandbox, module: str, request: dict[str, Any], timeout: float) -> ExecResult:
    """Run `inside/<module>.py` with a request in a box."""
    sources = [[name, _source(name)] for name in _MODULES[module]]
    stdin = json.dumps({"sources": sources, "request": request}).encode() + b"\n"
    return await box.exec([PYTHON, "-c", _BOOT], stdin=stdin, timeout=timeout)


def json_lines(data: bytes) -> list[Any]:
    """The lines that are JSON, up to the first that is not: whoever was in the box may have written them."""
    found = []
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return found
