"""Attention over packed sequences: exact, without a mask, and in few calls however short the sequences are.

Sequences of about one length are read as one batch, padded on the right. Causal attention needs no mask for that: what
is real comes before what is padding and never sees it, and what the padding sees is dropped. A token that several
sequences have in common (`prefix.py`) has a place in each.

Of the last layer only what is read is needed (`last.py`): there some tokens ask, with a mask, and all are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.train.prefix import Int64Array

ATTENTION = "agentrl_packed"
SLACK, SLACK_SHARE = 32, 16
"""A sequence joins longer ones of `longest` tokens where it lacks at most 32 + longest / 16 of them."""
FEW = 2
"""Tokens ask alone where they are at most 1/2 of a batch: with a mask attention takes twice what a causal one does."""
WIDEST = 1 << 24
"""Elements of such a mask."""


class Queries(NamedTuple):
    """The tokens of a pack that ask in the last layer, read in the batches of its `Layout`."""

    tokens: Tensor
    """`[N]`, ascending."""
    at: tuple[Tensor | None, ...]
    """Of each batch `[B, Q]`, where in their sequences the tokens stand that ask; None where all of it do."""
    rows: Tensor
    """`[S]`, the token that asks at each place of the batches."""
    places: Tensor
    """`[T]`, the place of each token that its state is taken from; 0 of one that does not ask."""
    unread: Tensor
    """The places that no state is taken from."""
    silent: Tensor
    """`[T - N]`, the tokens that do not ask."""


class Layout(NamedTuple):
    """Where the T tokens of a pack go to be read in batches."""

    shapes: tuple[tuple[int, int], ...]
    """Of each batch: sequences, and tokens of the longest of them."""
    rows: Tensor
    """`[S]`, the token that each place of the batches reads; at padding the last of its sequence."""
    places: Tensor
    """`[T]`, the place of each token that its state is taken from."""
    unread: Tensor
    """The places that no state is taken from: padding, and all but one of a token that several sequences share."""
    copies: tuple[tuple[Tensor, Tensor], ...]
    """Tokens `[N]` that n sequences share, and their places `[N, n]`, for each such n."""
    queries: Queries | None
    """Those of the last layer, where not all are asked for."""


def lay_out(
    lengths: Sequence[int], tokens: Int64Array | None, device: torch.device, read: Int64Array | None = None
) -> Layout:
    """How sequences of these lengths are read.

    `tokens` are those that the sequences consist of, one sequence after the other; None where each has its own. Of the
    last layer's states those of the tokens `read` are enough; None where all are wanted.
    """
    starts = np.cumsum([0, *lengths])
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or longest - lengths[index] > SLACK + longest // SLACK_SHARE:
            batches.append([])
        batches[-1].append(index)
    found, padded = [], []
    for batch in batches:
        place = np.arange(lengths[batch[0]])
        held = np.array([lengths[i] for i in batch])[:, None]
        found.append((starts[batch][:, None] + np.minimum(place, held - 1)).ravel())
        padded.append((place >= held).ravel())
    rows, padding = np.concatenate(found), np.concatenate(padded)
    rows = rows if tokens is None else tokens[rows]
    shapes = tuple((len(batch), lengths[batch[0]]) for batch in batches)
    real = np.flatnonzero(~padding)
    by_token = real[rows[real].argsort(kind="stable")]
    counts = np.bincount(rows[real])
    first = np.cumsum(counts) - counts
    places = by_token[first]
    copies = []
    for n in np.unique(counts[counts > 1]):
        several = np.flatnonzero(counts == n)
        copies.append((_put(several, device), _put(by_token[first[several][:, None] + np.arange(n)], device)))
    asked = None if read is None else _ask(shapes, rows, places, np.unique(read), device)
    unread = _put(_others(places, len(rows)), device)
    return Layout(shapes, _put(rows, device), _put(places, device), unread, tuple(copies), asked)


def _ask(
    shapes: tuple[tuple[int, int], ...], rows: Int64Array, places: Int64Array, read: Int64Array, device: torch.device
) -> Queries:
    """Each batch's askers as a rectangle: rows with fewer of them repeat their sequence's first token."""
    asking, found, size, start = np.zeros(len(rows), np.bool_), [], 0, 0
    asking[places[read]] = True
    at: list[Tensor | None] = []
    place = np.zeros(len(places), np.int64)
    for count, longest in shapes:
        here = asking[start : start + count * longest].reshape(count, longest)
        most = max(1, int(here.sum(1).max()))
        # A GPU's fused kernels want no mask: there all of a batch ask, and only what comes after is spared.
        if device.type != "cpu" or FEW * most > longest or count * most * longest > WIDEST:
            columns = np.broadcast_to(np.arange(longest), here.shape)
            at.append(None)
        else:
            columns = (~here).argsort(1, kind="stable")[:, :most]
            columns = np.where(np.take_along_axis(here, columns, 1), columns, 0)
            at.append(_put(columns, device))
        taken = (start + np.arange(count)[:, None] * longest + columns).ravel()
        chosen = np.flatnonzero(asking[taken])
        # A filler may be an asker too: the first of a token's places is the one that is read.
        chosen = chosen[np.unique(taken[chosen], return_index=True)[1]]
        place[rows[taken[chosen]]] = size + chosen
        found.append(rows[taken])
        size, start = size + len(taken), start + count * longest
    arrays = np.concatenate(found), place, _others(place[read], size), _others(read, len(places))
    return Queries(_put(read, device), tuple(at), *(_put(array, device) for array in arrays))


def _others(some: Int64Array, size: int) -> Int64Array:
    """The numbers below `size` that are not among `some`."""
    left = np.ones(size, np.bool_)
    left[some] = False
    return np.flatnonzero(left)


def _put(array: Int64Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    queries: Queries | None = None,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: query `[1, heads, T, D]`, key and value `[1, kv_heads, T, D]`.

    With `queries` the states of other tokens than these mean nothing.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} wants {name!r} in attention, which packed attention has not")
    if layout is None or (len(layout.rows) == layout.shapes[0][1] and queries is None):
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    # What a query's copies say is not read, so that only keys and values have gradients from several places.
    keys, values = (_by_batch(_spread(_rows(x), layout), layout.shapes) for x in (key, value))
    asks = layout if queries is None else queries
    at = (None,) * len(layout.shapes) if queries is None else queries.at
    asked = _select(_rows(query), asks.rows, asks.places, None if queries is None else queries.silent)
    shapes = [(n, longest if x is None else x.shape[1]) for (n, longest), x in zip(layout.shapes, at, strict=True)]
    batches = zip(_by_batch(asked, shapes), keys, values, at, strict=True)
    out = [_causal(q, k, v, scaling, sliding_window, x).transpose(1, 2).flatten(0, 1) for q, k, v, x in batches]
    joined = out[0] if len(out) == 1 else torch.cat(out)
    return _select(joined, asks.places, asks.rows, asks.unread)[None], None


def _rows(x: Tensor) -> Tensor:
    """`[1, heads, T, D]` → `[T, heads, D]`; `squeeze`, since the gradient of `x[0]` is a copy among zeros."""
    return x.squeeze(0).transpose(0, 1)


def _by_batch(spread: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """`[S, heads, D]` → of each batch of B sequences of n places `[B, heads, n, D]`."""
    parts = (spread,) if len(shapes) == 1 else torch.split(spread, [count * n for count, n in shapes])
    return [part.view(*shape, *part.shape[1:]).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, at: Tensor | None = None
) -> Tensor:
    """`at` `[B, Q]`: where in their sequences the queries stand; None where they are the sequences."""
    n, grouped = key.shape[2], query.shape[1] != key.shape[1]
    if at is None and (window is None or n <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    place = torch.arange(n, device=query.device)
    back = (place[None] if at is None else at)[:, None, :, None] - place  # [B or 1, 1, Q, n]
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped)


class _Select(torch.autograd.Function):
    """Rows of `x` by number. Its gradient is a selection too, but for the few rows that were taken several times."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, back: Tensor, unread: Tensor | None, copies: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.back, ctx.unread, ctx.copies = back, unread, copies
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        found = grad.index_select(0, ctx.back)
        if ctx.unread is not None:
            found.index_fill_(0, ctx.unread, 0.0)
        for tokens, places in ctx.copies:
            several = grad.index_select(0, places.flatten())
            found.index_copy_(0, tokens, several.view(*places.shape, *grad.shape[1:]).sum(1))
        return found, None, None, None, None


def _select(x: Tensor, rows: Tensor, back: Tensor, unread: Tensor | None = None) -> Tensor:
    """`x` at `rows`. Each row of `x` has its gradient at `back`, but for those that are `unread`, which have none."""
    return cast(Tensor, _Select.apply(x, rows, back, unread, ()))  # type: ignore[no-untyped-call]


def _spread(packed: Tensor, layout: Layout) -> Tensor:
    """From the pack into the batches. Nothing of the loss rests on padding, so it gives no gradient back."""
    return cast(Tensor, _Select.apply(packed, layout.rows, layout.places, None, layout.copies))  # type: ignore[no-untyped-call]
