"""One folder to many hosts in a time that grows with the logarithm of their number: who has it serves others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from agentrl.errors import AgentRLError

Fetch = Callable[[str, Sequence[str]], Awaitable[None]]
"""Have the first fetch from the first of the others that can."""


async def spread(origin: str, targets: Sequence[str], fetch: Fetch, *, fanout: int, seconds: float) -> dict[str, str]:
    """Bring what `origin` has to all `targets`; those that failed or took longer than `seconds`, with the reason.

    A source serves at most `fanout` downloads at a time. A target whose source fails asks the origin itself.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    free = deque([origin] * fanout)
    waiting = deque(targets)
    running: dict[asyncio.Future[None], tuple[str, str]] = {}
    failures: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and free:
                source, target = free.popleft(), waiting.popleft()
                sources = [source] if source == origin else [source, origin]
                running[asyncio.ensure_future(fetch(target, sources))] = (source, target)
            done, _ = await asyncio.wait(
                running, timeout=max(0.0, until - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                late = [target for _, target in running.values()] + list(waiting)
                return failures | dict.fromkeys(late, f"it took longer than {seconds:g} s")
            for task in done:
                source, target = running.pop(task)
                free.append(source)
                error = task.exception()
                if error is None:
                    free.extend([target] * fanout)
                elif isinstance(error, AgentRLError):
                    failures[target] = str(error)
                else:
                    raise error
        return failures
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
