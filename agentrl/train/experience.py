"""From packed batches to what a loss needs: the passes before training, advantages, whitening, the weights of tokens.

An episode's tokens may lie in several passes and on several ranks; an algorithm's `advantages` sees them in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.train import functional, report
from agentrl.train.algorithm import Algorithm, EpisodeTokens, Output
from agentrl.train.batch import EPISODES, Batch
from agentrl.train.functional import Denominators, token_weights

Minibatches = list[list[Batch]]
Rows = NDArray[Any]
"""float64 `[n, 8]`, one a trained token: see `_rows`."""


class Passes(Protocol):
    """What is asked of a backend; `agentrl.train.deepspeed.Backend` is one. All ranks ask alike."""

    rank: int
    world: int

    def predict(self, batches: Sequence[Batch]) -> list[Output]: ...
    def reference(self, batches: Sequence[Batch]) -> list[Tensor]: ...
    def sum(self, values: Tensor) -> Tensor: ...


def predict(backend: Passes, algorithm: Algorithm, minibatches: Minibatches) -> Minibatches:
    """Log-probs and values under the weights at the step's start, and the reference's log-probs, where wanted.

    With a single optimizer step the proximal log-probs are the training forward's own, detached: no pass is needed
    unless a critic or a penalty in the reward asks for one.
    """
    if algorithm.demonstrations:
        return minibatches
    flat = [batch for batches in minibatches for batch in batches]
    if len(minibatches) > 1 or algorithm.critic or algorithm.penalizes:
        outs = backend.predict(flat)
        flat = [b.with_proximal(out.logprobs, out.values) for b, out in zip(flat, outs, strict=True)]
    if algorithm.reference:
        flat = [b.with_reference(found) for b, found in zip(flat, backend.reference(flat), strict=True)]
    return _regroup(flat, minibatches)


def estimate(backend: Passes, algorithm: Algorithm, minibatches: Minibatches, groups: int) -> Minibatches:
    """Advantages, whitened where wanted, and loss weights. `groups` is the step's number of groups."""
    flat = [batch for batches in minibatches for batch in batches]
    if not algorithm.demonstrations:
        flat = _with_advantages(backend, algorithm, flat)
        if algorithm.options.whiten != "off":
            flat = _whitened(backend, flat, groups if algorithm.options.whiten == "group" else None)
    return [_with_weights(backend, algorithm, batches) for batches in _regroup(flat, minibatches)]


def _regroup(flat: Sequence[Batch], like: Minibatches) -> Minibatches:
    rest = iter(flat)
    return [[next(rest) for _ in batches] for batches in like]


# ---- advantages --------------------------------------------------------------------------------------------------


def _with_advantages(backend: Passes, algorithm: Algorithm, batches: Sequence[Batch]) -> list[Batch]:
    tables = [_rows(algorithm, batch) for batch in batches]
    mine = np.concatenate(tables)
    table = np.concatenate([mine, _missing(backend, batches, mine)])
    order = np.lexsort(table.T[3::-1])
    found = np.zeros((2, len(table)))
    starts = np.flatnonzero(np.diff(table[order, 0], prepend=np.nan))
    for part in np.split(order, starts[1:]) if len(order) else ():
        turns, credit, values, penalty = table[part].T[[1, 4, 5, 6]]
        estimate = algorithm.advantages(EpisodeTokens(turns.astype(np.int64), credit, values, penalty))
        found[0, part] = estimate.advantages
        if estimate.returns is not None:
            found[1, part] = estimate.returns
    filled, at = [], 0
    for batch, rows in zip(batches, tables, strict=True):
        own = torch.from_numpy(found[:, at : at + len(rows)]).float()
        at += len(rows)
        advantages, returns = (torch.zeros(len(batch.tokens)).masked_scatter(batch.mask, x) for x in own)
        filled.append(batch.with_advantages(advantages, returns if algorithm.critic else None))
    return filled


def _rows(algorithm: Algorithm, batch: Batch) -> Rows:
    """Of each trained token: episode, turn, trajectory, position (its order), credit, value, penalty, and how many
    trained tokens its episode has."""
    mask = batch.mask
    zeros = torch.zeros(len(mask))
    penalty = zeros
    if algorithm.penalizes:
        if batch.proximal is None or batch.reference is None:
            raise ValueError("a KL penalty in the reward needs the proximal and the reference's log-probs")
        estimator, coefficient = algorithm.options.kl_estimator, algorithm.options.kl_coef
        penalty = coefficient * functional.kl(batch.proximal, batch.reference, mask, estimator)
    values = zeros if batch.values is None else batch.values
    order = (batch.episodes, batch.turns, batch.trajectories, batch.positions)
    columns = (*order, batch.credit, values, penalty, batch.episode_tokens)
    return torch.stack([c[mask].double() for c in columns], 1).numpy()


def _missing(backend: Passes, batches: Sequence[Batch], mine: Rows) -> Rows:
    """The other ranks' rows of the episodes of which this rank has only a part."""
    if backend.world == 1:
        return mine[:0]
    _, place, counts = np.unique(mine[:, 0], return_inverse=True, return_counts=True)
    torn = mine[counts[place] < mine[:, 7]]
    sizes = torch.zeros(backend.world, dtype=torch.int64)
    sizes[backend.rank] = len(torn)
    sizes = backend.sum(sizes).cpu()
    if int(sizes.sum()) == 0:
        return mine[:0]
    begin = int(sizes[: backend.rank].sum())
    everything = torch.zeros(int(sizes.sum()), mine.shape[1], dtype=torch.float64)
    everything[begin : begin + len(torn)] = torch.from_numpy(torn)
    rows = backend.sum(everything).cpu().numpy()
    others = np.delete(rows, np.s_[begin : begin + len(torn)], axis=0)
    return others[np.isin(others[:, 0], torn[:, 0])]


def _whitened(backend: Passes, batches: Sequence[Batch], groups: int | None) -> list[Batch]:
    """(A - mean)/std over the trained tokens of all ranks: of each of the `groups`, or of all in one."""
    places = [torch.zeros_like(b.episodes) if groups is None else b.episodes.clamp(min=0) // EPISODES for b in batches]

    def added(power: int, centre: Tensor) -> Tensor:
        sums = torch.zeros(groups or 1, 2, dtype=torch.float64)
        for batch, place in zip(batches, places, strict=True):
            at = place[batch.mask]
            a = batch.advantages[batch.mask].double() - centre[at]
            sums.index_add_(0, at, torch.stack([torch.ones_like(a), a.pow(power)], 1))
        count, total = backend.sum(sums).cpu().unbind(1)
        return total / count.clamp(min=1)

    # In two passes: the difference of two large sums would lose a small deviation.
    mean = added(1, torch.zeros(groups or 1, dtype=torch.float64))
    deviation = added(2, mean).sqrt()
    whitened = []
    for batch, place in zip(batches, places, strict=True):
        found = (batch.advantages.double() - mean[place]) / (deviation[place] + 1e-6)
        whitened.append(batch.with_advantages(torch.where(batch.mask, found, 0.0).float(), batch.returns))
    return whitened


def _with_weights(backend: Passes, algorithm: Algorithm, batches: Sequence[Batch]) -> list[Batch]:
    """Loss weights whose denominators span all ranks and passes of the optimizer step."""
    options = algorithm.options
    _, _, tokens, _, episodes = backend.sum(report.local_counts([batches])).tolist()
    totals = Denominators(tokens, round(episodes))
    return [
        b.with_weights(token_weights(b.mask, b.episode_tokens, totals, options.aggregation, options.fixed_length))
        for b in batches
    ]
