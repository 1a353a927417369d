"""What a long-lived process of a run sets once, when what it needs is loaded."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Search for garbage cycles rarely: every search walks all that is loaded and thousands of live tasks, in vain.

    An eighth of the CPU time of a turn, and pauses of tenths of a second for all threads of the process. Reference
    counts free everything else as before.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
