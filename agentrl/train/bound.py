"""A bound on what no exception can end: a call that waits within a library, for a process that will not answer."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say_failed(kind: str, text: str) -> None:
    """One line with its time: of several ranks the conductor names the one that failed first."""
    text = (text.strip() or "no words").splitlines()[0]
    rank = os.environ.get("RANK", "0")
    print(f"agentrl.train: rank {rank} failed at {time.time():.3f}: {kind}: {text}", file=sys.stderr, flush=True)


@contextmanager
def ended_after(seconds: float, text: str) -> Iterator[None]:
    """End this process with `text` and the stacks of all threads on stderr where the block takes longer."""
    over = threading.Event()

    def watch() -> None:
        if not over.wait(seconds):
            say_failed("RanksDoNotMeet", text)
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            os._exit(1)

    threading.Thread(target=watch, name="bound", daemon=True).start()
    try:
        yield
    finally:
        over.set()
