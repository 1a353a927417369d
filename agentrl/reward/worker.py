"""A worker process: calls functions that it is named, one at a time (`python -m agentrl.reward.worker`).

Protocol: JSON lines. In: `{"function", "args", "kwargs", "seconds", "by_cpu", "warm"}`;
out: `{"ok": result}` or `{"error", "kind"}`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import sys
from typing import Any

from agentrl.config import resolve_object

GRACE = 2.0
"""Beyond a call's deadline the worker ends itself: its parent may be gone, and a C loop never looks."""


def main(memory_mb: int) -> None:
    """Serve until the input closes."""
    # The protocol keeps the real stdout for itself: what a function prints goes to stderr.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(20_000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    for line in sys.stdin:
        call = json.loads(line)
        if call["warm"]:
            # Imports what the function needs; whether that works, the call itself will say.
            _answer({**call, "function": "agentrl.config:resolve_object", "args": [call["function"]], "kwargs": {}})
            channel.write("{}\n")
            channel.flush()
            continue
        timer = signal.ITIMER_PROF if call["by_cpu"] else signal.ITIMER_REAL
        signal.setitimer(timer, call["seconds"] + GRACE)
        answer = _answer(call)
        signal.setitimer(timer, 0)
        channel.write(answer + "\n")
        channel.flush()


def _answer(call: dict[str, Any]) -> str:
    # A process boundary: whatever the function raises is told to the caller.
    try:
        function = resolve_object(call["function"])
        result = function(*call["args"], **call["kwargs"])
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            result = dataclasses.asdict(result)
        return json.dumps({"ok": result})
    except Exception as error:
        return json.dumps({"error": str(error), "kind": type(error).__name__})


if __name__ == "__main__":
    main(int(sys.argv[1]))
