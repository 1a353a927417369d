"""Which cache row holds what: running sequences in the first rows, finished ones kept for their prefix.

A conversation's next turn finds its earlier turns here, and the members of a group find the prompt that one of them has
prefilled. Where a sequence has ended among the running ones its row stays there for a while as a hole: a tool mostly
answers within a few steps, and a hole costs a step less than moving two rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentrl.engine.embedded.model import KVCache
from agentrl.engine.embedded.sequence import Live
from agentrl.types import Int32Array

_PATIENCE = 4
"""Steps after which a hole is closed."""


class Slots:
    """Rows 0..span-1 run, but for the holes. `ids[row]` are a row's tokens, `held[row]` of which are in the cache.

    Of a running row `lengths` counts all tokens: the newest has not been through the model, so it is not in the cache.
    """

    def __init__(self, cache: KVCache, rows: int, running: int, context: int) -> None:
        self.cache = cache
        self.running = running
        self._rows: list[Live | None] = []
        self._holes: dict[int, int] = {}
        """Steps that each has been there."""
        self.lengths = np.zeros(rows, np.int64)
        self.held = np.zeros(rows, np.int64)
        self.temperatures = np.ones(rows, np.float32)
        self.seeds = np.zeros(rows, np.uint64)
        self.last = np.zeros(rows, np.int64)
        self.ids = np.zeros((rows, context), np.int32)
        self._used = np.zeros(rows, np.int64)
        self._clock = 0

    @property
    def active(self) -> list[Live]:
        """What runs, in the order of its rows."""
        return [live for live in self._rows if live is not None]

    @property
    def span(self) -> int:
        """Rows that a step goes through."""
        return len(self._rows)

    @property
    def count(self) -> int:
        """How many run."""
        return len(self._rows) - len(self._holes)

    @property
    def holes(self) -> set[int]:
        """Rows among them that hold what has ended."""
        return set(self._holes)

    @property
    def full(self) -> bool:
        """Whether nothing more can run."""
        return self.count >= self.running

    def live(self, row: int) -> Live:
        """What runs in a row."""
        live = self._rows[row]
        assert live is not None, "a hole is no sequence"
        return live

    def step(self) -> NDArray[np.int64]:
        """The rows that take part in a step; closes the holes that have waited in vain."""
        for row in sorted(self._holes):
            waited = self._holes.get(row)
            if waited is None:
                continue
            if waited < _PATIENCE:
                self._holes[row] = waited + 1
                continue
            final = self.span - 1
            self._swap(row, final)
            self._rows[row], self._rows[final] = self._rows[final], None
            self._holes[final] = self._holes.pop(row)
            self._trim()
        return np.array([row for row, live in enumerate(self._rows) if live is not None], np.int64)

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
        ids = live.ids
        source, shared = self.match(ids)
        kept = np.ones(len(self.held), np.bool_)
        kept[: self.span] = [running is None for running in self._rows]
        # A kept row that shares most of what it holds is the request's own earlier turns: taken over whole.
        own = bool(kept[source]) and 2 * shared >= self.held[source]
        row = source if own else int(np.where(kept, self._used, np.iinfo(np.int64).max).argmin())
        if row < self.span:
            target = row
        elif self.span < self.running:
            target = self.span
        else:
            target = max(self._holes, key=self._holes.__getitem__)
        self._swap(row, target)
        source = target if source == row else row if source == target else source
        if shared and source != target:
            self.cache.copy(source, target, shared)
        if target == self.span:
            self._rows.append(live)
        else:
            self._rows[target] = live
            del self._holes[target]
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
        row = self._rows.index(live)
        self._touch(row)
        self._rows[row] = None
        self._holes[row] = 0
        self._trim()

    def forget(self, live: Live) -> None:
        """Drop what its row holds."""
        row = self._rows.index(live)
        self.held[row] = 0
        self.cache.clear(row)

    def retract(self) -> list[Live]:
        """The weights changed: nothing in the cache is true any more. Returns what was running."""
        retracted = self.active
        self._rows.clear()
        self._holes.clear()
        self.held[:] = 0
        for live in retracted:
            live.waiting = True
            live.retractions += 1
        return retracted

    def drop_kept(self) -> None:
        """Forget finished sequences only."""
        self.held[self.span :] = 0
        self.held[list(self._holes)] = 0

    def _trim(self) -> None:
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
            del self._holes[self.span]

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used[row] = self._clock

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.cache.swap(a, int(self.held[a]), b, int(self.held[b]))
        for array in (self.lengths, self.held, self.temperatures, self.seeds, self.last, self._used, self.ids):
            array[[a, b]] = array[[b, a]]
