"""What a process that holds an endpoint sets once, when it starts."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Search for garbage cycles rarely: every search walks thousands of live tasks and client types and finds nothing.

    An eighth of the CPU time of a turn, and pauses of tenths of a second. Reference counts free everything else as
    before.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
