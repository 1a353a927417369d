"""Garbage collection in processes that hold an endpoint."""

from __future__ import annotations

import gc

from agentrl.endpoint.process import collect_seldom


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
    try:
        often = collections_while_allocating(120_000)
        collect_seldom()
        seldom = collections_while_allocating(120_000)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    assert often > 100
    assert 1 <= seldom <= 3
