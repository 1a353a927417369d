"""What a long-lived process of a run sets once, when what it needs is loaded."""

from __future__ import annotations

import ctypes
import gc


def collect_seldom() -> None:
    """Search for garbage cycles rarely: every search walks all that is loaded and thousands of live tasks, in vain.

    An eighth of the CPU time of a turn, and pauses of tenths of a second for all threads of the process. Reference
    counts free everything else as before.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def keep_freed_memory() -> None:
    """Keep what large tensors give back for the next ones, up to 2 GiB, where the allocator is glibc's.

    By default it returns each block to the system, which hands it out again page by page, filled with zeros: a sixth of
    the CPU time of a training step of SmolLM2-135M.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
    # A thread's own arena holds 64 MiB at most; the engine generates in a thread.
    mallopt(arena_max, 1)
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)
