"""The sandboxes that all coding environments of a process share, while there are any.

Two pools: one for the boxes that episodes keep, one for grading, so that an episode that holds a box and waits for its
grade never waits for itself. Both start with the first user of a running event loop and end with the last.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.options import CodeOptions
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.pool import Pool, open_sandbox


class Bench:
    """`boxes` to work in, and a `pool` for graders."""

    def __init__(self, options: SandboxOptions) -> None:
        self.boxes: Pool = open_sandbox(options)
        self.pool: Pool = open_sandbox(options)
        self.users = 0

    def reward(self, options: CodeOptions) -> CodeReward:
        """A grader on the shared boxes."""
        return CodeReward(self.pool, options)


_Benches = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[SandboxOptions, Bench]]


# Boxes cost a tenth of a second each to start, and environments are made one an episode.
@functools.cache
def _benches() -> _Benches:
    return weakref.WeakKeyDictionary()


@asynccontextmanager
async def shared_bench(options: SandboxOptions) -> AsyncIterator[Bench]:
    """The bench of this event loop for these options; closed when its last user leaves.

    Raises ConfigError where this machine cannot offer the kind of sandbox.
    """
    benches = _benches().setdefault(asyncio.get_running_loop(), {})
    if options not in benches:
        benches[options] = Bench(options)
    bench = benches[options]
    bench.users += 1
    try:
        yield bench
    finally:
        bench.users -= 1
        if bench.users == 0 and benches.get(options) is bench:
            del benches[options]
            await bench.boxes.close()
            await bench.pool.close()
