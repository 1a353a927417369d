"""What an evaluation says: means over rows, pass@k, and how sure one can be of them.

Rows are the sample, not episodes: k episodes of one row are no k independent observations of the data set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Z = 1.959963984540054
"""Of a two-sided 95 % interval."""


class Estimate(NamedTuple):
    """A mean over rows and its 95 % interval; None without rows."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.value is None or self.low is None or self.high is None:
            return "–"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Summary(NamedTuple):
    """Of one data set. `rows` are those with a scored episode; `passes` has pass@1, pass@2, pass@4, … up to k."""

    rows: int
    episodes: int
    scored: int
    k: int
    average: Estimate
    passes: Mapping[int, Estimate]


def summarize(rewards: Sequence[Sequence[float | None]], *, passing: float = 1.0) -> Summary:
    """`rewards` holds each row's episodes, None where there was no verdict; `passing` is the least that counts.

    avg@k is the mean over rows of the row's mean. pass@j is the mean over rows of the chance that the best of j of its
    episodes passes, unbiased: 1 − C(n−c, j)/C(n, j) with c passes of n (Chen et al. 2021, arXiv:2107.03374).
    """
    scored = [[reward for reward in row if reward is not None] for row in rewards]
    scored = [row for row in scored if row]
    k = max(map(len, scored), default=0)
    passes = {}
    for j in _powers(k):
        enough = [row for row in scored if len(row) >= j]
        passes[j] = interval([pass_at(len(row), sum(r >= passing for r in row), j) for row in enough])
    return Summary(
        rows=len(scored),
        episodes=sum(map(len, rewards)),
        scored=sum(map(len, scored)),
        k=k,
        average=interval([sum(row) / len(row) for row in scored]),
        passes=passes,
    )


def pass_at(n: int, c: int, k: int) -> float:
    """The chance that at least one of k passes, when k of n episodes are drawn of which c pass."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} passes among {n} episodes is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def interval(values: Sequence[float]) -> Estimate:
    """The mean of rows' values with a 95 % interval.

    Within [0, 1]: Wilson's score interval with the rows as trials, which is never empty and never too narrow (no
    distribution on [0, 1] with that mean varies more). Otherwise mean ± 1.96 standard errors, which needs two rows.
    """
    n = len(values)
    if n == 0:
        return Estimate(None, None, None)
    mean = math.fsum(values) / n
    if all(0.0 <= value <= 1.0 for value in values):
        centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(max(0.0, mean * (1 - mean)) / n + Z * Z / (4 * n * n))
        return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))
    if n == 1:
        return Estimate(mean, None, None)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return Estimate(mean, mean - Z * error, mean + Z * error)


def _powers(k: int) -> list[int]:
    found = [1 << i for i in range(k.bit_length()) if 1 << i <= k]
    return found if not found or found[-1] == k else [*found, k]
