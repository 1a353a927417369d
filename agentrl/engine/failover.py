"""One request on one engine of several, until the engine is known to be lost."""

from __future__ import annotations

import asyncio

from agentrl.engine.client import EngineClient
from agentrl.engine.reply import Progress
from agentrl.engine.types import Completion, OnTokens


async def go_on_until(
    lost: asyncio.Event, client: EngineClient, progress: Progress, on_tokens: OnTokens | None, *, guarded: bool
) -> Completion | None:
    """`client.go_on` for a fleet: None where `lost` is set first; the tokens so far are in `progress`."""
    work = asyncio.ensure_future(client.go_on(progress, on_tokens, fail_over=True, guarded=guarded))
    gone = asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.wait((work,))
    return work.result() if not work.cancelled() and work.exception() is None else None
