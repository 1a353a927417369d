"""The queue before the boxes: bounded, first come, first served, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from agentrl.errors import DeadlineExceeded, InfrastructureError
from agentrl.reward.code.options import CodeOptions
from agentrl.sandbox.types import Sandbox, SandboxPool


class Line:
    """A pool whose `box()` refuses where too many wait, and gives up after a while."""

    def __init__(self, pool: SandboxPool, options: CodeOptions) -> None:
        self._pool = pool
        self._options = options
        self.waiting = 0

    @asynccontextmanager
    async def box(self) -> AsyncIterator[Sandbox]:
        """A clean box; InfrastructureError where the queue is full or too slow."""
        if self.waiting >= self._options.most_waiting:
            raise InfrastructureError(f"{self.waiting} answers wait for a box: more slots, or a larger most_waiting")
        async with AsyncExitStack() as stack:
            self.waiting += 1
            try:
                async with asyncio.timeout(self._options.queue_seconds):
                    box = await stack.enter_async_context(self._pool.box())
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"no box was free within {self._options.queue_seconds:g} s; {self.waiting} answers wait: more slots"
                ) from error
            finally:
                self.waiting -= 1
            yield box
