"""Which cache row holds what: running sequences in the first rows, finished ones kept behind them for their prefix.

A conversation's next turn finds its earlier turns here, and the members of a group find the prompt that one of them has
prefilled.
"""

from __future__ import annotations

import numpy as np

from agentrl.engine.embedded.model import KVCache
from agentrl.engine.embedded.sequence import Live
from agentrl.types import Int32Array


class Slots:
    """Rows 0..active-1 run. `ids[row]` are a row's tokens and `held[row]` says how many of them are in the cache.

    Of a running row `lengths` counts all tokens: the newest has not been through the model, so it is not in the cache.
    """

    def __init__(self, cache: KVCache, rows: int, running: int, context: int) -> None:
        self.cache = cache
        self.running = running
        self.active: list[Live] = []
        self.lengths = np.zeros(rows, np.int64)
        self.held = np.zeros(rows, np.int64)
        self.temperatures = np.ones(rows, np.float32)
        self.seeds = np.zeros(rows, np.uint64)
        self.last = np.zeros(rows, np.int64)
        self.ids = np.zeros((rows, context), np.int32)
        self._used = np.zeros(rows, np.int64)
        self._clock = 0

    @property
    def full(self) -> bool:
        """Whether nothing more can run."""
        return len(self.active) >= self.running

    def match(self, ids: Int32Array) -> tuple[int, int]:
        """The row with the longest prefix of `ids` in the cache, and that prefix's length (short of the last token)."""
        n = ids.size - 1
        same = self.ids[:, :n] == ids[:n]
        first = np.where(same.all(1), n, same.argmin(1)) if n else np.zeros(len(self.held), np.int64)
        found = np.minimum(first, self.held)
        row = int(found.argmax())
        return row, int(found[row])

    def admit(self, live: Live) -> tuple[int, int]:
        """Give the sequence a row; returns it and how many tokens of the sequence it already holds."""
        ids, target = live.ids, len(self.active)
        source, shared = self.match(ids)
        kept = source >= target
        # A kept row that shares most of what it holds is the request's own earlier turns: taken over whole.
        row = source if kept and 2 * shared >= self.held[source] else target + int(self._used[target:].argmin())
        self._swap(row, target)
        source = target if source == row else row if source == target else source
        if shared and source != target:
            self.cache.copy(source, target, shared)
        self.active.append(live)
        self.lengths[target], self.held[target] = ids.size, shared
        self.ids[target, : ids.size] = ids
        self.temperatures[target] = live.rule.temperature
        self.seeds[target] = live.rule.seed
        self._touch(target)
        live.cached = shared
        live.waiting = False
        return target, shared

    def release(self, live: Live) -> None:
        """The sequence ended: its row is kept for its prefix."""
        row, final = self.active.index(live), len(self.active) - 1
        self._touch(row)
        self._swap(row, final)
        self.active[row] = self.active[final]
        self.active.pop()

    def forget(self, row: int) -> None:
        """Drop what a row holds."""
        self.held[row] = 0
        self.cache.clear(row)

    def retract(self) -> list[Live]:
        """The weights changed: nothing in the cache is true any more. Returns what was running."""
        retracted, self.active = self.active, []
        self.held[:] = 0
        for live in retracted:
            live.waiting = True
            live.retractions += 1
        return retracted

    def drop_kept(self) -> None:
        """Forget finished sequences only."""
        self.held[len(self.active) :] = 0

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.cache.swap(a, int(self.held[a]), b, int(self.held[b]))
        for array in (self.lengths, self.held, self.temperatures, self.seeds, self.last, self._used, self.ids):
            array[[a, b]] = array[[b, a]]
