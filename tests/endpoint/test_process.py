"""Garbage collection in processes that hold an endpoint."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.endpoint.session import Session
from agentrl.process import collect_seldom


def collections_while_allocating(n: int) -> int:
    """How often cycles are searched for while `n` containers come to life and stay."""
    seen: list[str] = []

    def count(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(count)
    try:
        kept = [[i] for i in range(n)]
    finally:
        gc.callbacks.remove(count)
    assert len(kept) == n
    return seen.count("start")


def test_collections_become_rare_and_still_happen() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        often = collections_while_allocating(50_000)
        collect_seldom()
        seldom = collections_while_allocating(50_000)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    assert often > 40
    assert 1 <= seldom <= 6


@pytest.mark.parametrize("settings", [{}, {"n": 2}, {"stream": True}])
@pytest.mark.parametrize("http", [False, True])
async def test_a_closed_session_needs_no_collection(setup: Callable[..., Any], settings: Any, http: bool) -> None:
    """An episode is megabytes, and full collections are rare."""
    made = setup("a<|im_end|>")
    if http:
        await made.endpoint.start()

    async def episode() -> weakref.ref[Session]:
        session = made.open()
        client = session.openai() if http else session
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}], **settings)
        if settings.get("stream"):
            async for _ in reply:
                pass
        assert len(await session.close()) == settings.get("n", 1)
        return weakref.ref(session)

    await episode()  # the first one loads and builds what all share
    gc.disable()
    try:
        closed = await episode()
        async with asyncio.timeout(60):
            while closed() is not None:  # noqa: ASYNC110  # the server's side ends a few rounds later
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
        await made.endpoint.stop()
