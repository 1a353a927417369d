"""Which row comes when, and with which seeds: functions of the run's seed alone, never of timing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import orjson

from agentrl.errors import DataError
from agentrl.types import Row
from agentrl.wire import json_bytes


class Place(NamedTuple):
    """Where a position of the run's data order lies."""

    epoch: int
    row: int


def stable_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) from `parts`: equal on every machine and Python (`hash()` is not)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def episode_seed(run_seed: int, place: Place, attempt: int) -> int:
    """What `Env.reset` is given: equal for all episodes of a group."""
    return stable_seed("episode", run_seed, place.epoch, place.row, attempt)


def sampling_seed(run_seed: int, place: Place, attempt: int, sample: int) -> int:
    """What a session samples with: another one for each episode of a group."""
    return stable_seed("sampling", run_seed, place.epoch, place.row, attempt, sample)


class Schedule:
    """The order of the rows: position (0, 1, 2, … over all epochs) to epoch and row.

    `start` is the position at which this data set begins: 0, or later where a run was resumed with other data.
    """

    def __init__(self, n_rows: int, seed: int, *, epochs: int | None, shuffle: bool, start: int = 0) -> None:
        if n_rows < 1:
            raise DataError("there are no rows to play: the data set is empty")
        self.n_rows = n_rows
        self.seed = seed
        self.epochs = epochs
        self.shuffle = shuffle
        self.start = start
        self._orders: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    @property
    def end(self) -> int | None:
        """The first position that does not exist; None where epochs go on for ever."""
        return None if self.epochs is None else self.start + self.epochs * self.n_rows

    def place(self, position: int) -> Place:
        """The epoch and the row of `position`."""
        if position < self.start or (self.end is not None and position >= self.end):
            raise IndexError(f"position {position} is outside [{self.start}, {self.end})")
        epoch, at = divmod(position - self.start, self.n_rows)
        return Place(epoch, int(self._order(epoch)[at]) if self.shuffle else at)

    def _order(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if epoch not in self._orders:
            if len(self._orders) > 3:
                del self._orders[min(self._orders)]
            # RandomState: its stream is frozen over numpy's versions, Generator's is not.
            self._orders[epoch] = np.random.RandomState(stable_seed("order", self.seed, epoch)).permutation(self.n_rows)
        return self._orders[epoch]


def fingerprint(rows: Sequence[Row], seed: int, shuffle: bool) -> str:
    """What makes two data orders the same: the seed, the number of rows, and up to 1,000 rows spread over the whole."""
    digest = hashlib.blake2b(repr((seed, shuffle, len(rows))).encode(), digest_size=12)
    for index in range(0, len(rows), max(1, len(rows) // 1000)):
        digest.update(json_bytes(dict(rows[index]), orjson.OPT_SORT_KEYS))
    return digest.hexdigest()
