"""Whether this process gets on. A rank that waits for others stands still; one that loads slowly does not.

Nothing is known of how long a load may take, but a rank that loads reads, computes, sends, or has a child that
compiles. Where all ranks of a group stand still at once, each waits for another, and none will ever come.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

COMPUTES = 0.02
"""A thread that computes for less than this part of the time waits: it wakes up to see that there is nothing yet."""
BYTES = 1 << 20
FAULTS = 16
"""Pages read from disk, for what is mapped into memory; less of either is not a load, but this process's own noise."""
_PACKAGE = Path(__file__).parents[1]


class _Seen(NamedTuple):
    at: float
    place: tuple[tuple[int, int], ...]
    computed: float
    moved_bytes: int
    faults: int


class Stillness:
    """Since when the thread has been at one place and has computed nothing, while its process read and sent nothing."""

    def __init__(self, thread: threading.Thread, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread, self._clock = thread, clock
        self._before = _children()  # of whoever had this process before; one that is there to stay tells nothing
        self._last = self._look()[0]

    def look(self) -> tuple[float, str]:
        """For how many seconds, as far as was looked before; and where the thread is."""
        now, where = self._look()
        last, elapsed = self._last, now.at - self._last.at
        if (
            now.place != last.place
            or now.computed - last.computed > max(0.05, COMPUTES * elapsed)
            or now.moved_bytes - last.moved_bytes > BYTES
            or now.faults - last.faults > FAULTS
            or _children() - self._before
        ):
            self._last, elapsed = now, 0.0
        return elapsed, where

    def _look(self) -> tuple[_Seen, str]:
        frame = sys._current_frames().get(self._thread.ident or 0)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        place, where = _place(frame)
        moved = _bytes_by_calls() + 512 * usage.ru_inblock
        return _Seen(self._clock(), place, self._computed(), moved, usage.ru_majflt), where

    def _computed(self) -> float:
        if sys.platform == "linux" and self._thread.ident is not None and self._thread.is_alive():
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        return time.process_time()


def _place(frame: FrameType | None) -> tuple[tuple[tuple[int, int], ...], str]:
    """Where a thread is, exactly; and in words: its innermost call, and the innermost one of ours that led there."""
    place: list[tuple[int, int]] = []
    words: list[str] = []
    ours = False
    while frame is not None:
        code = frame.f_code
        place.append((id(code), frame.f_lasti))
        mine = not ours and Path(code.co_filename).is_relative_to(_PACKAGE)
        if not words or mine:
            words.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
        ours = ours or mine
        frame = frame.f_back
    return tuple(place), ", called by ".join(words) or "nowhere"


def _bytes_by_calls() -> int:
    """What was read and written, by files' calls or by a socket's `writev`; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))


def _children() -> set[str]:
    try:
        tasks = [(task / "children").read_text() for task in Path(f"/proc/{os.getpid()}/task").iterdir()]
    except OSError:
        return set()
    return {pid for text in tasks for pid in text.split()}
