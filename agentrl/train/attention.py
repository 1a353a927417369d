"""Attention over packed sequences: exact, without a mask, and in few calls however short the sequences are.

Sequences of about one length are read as one batch, padded on the right. Causal attention needs no mask for that: what
is real comes before what is padding and never sees it, and what the padding sees is dropped. A token that several
sequences have in common (`prefix.py`) has a place in each.
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


def lay_out(lengths: Sequence[int], tokens: Int64Array | None, device: torch.device) -> Layout | None:
    """How sequences of these lengths are read; None where there is one alone.

    `tokens` are those that the sequences consist of, one sequence after the other; None where each has its own.
    """
    if len(lengths) == 1:
        return None
    starts = np.cumsum([0, *lengths])
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or longest - lengths[index] > SLACK + longest // SLACK_SHARE:
            batches.append([])
        batches[-1].append(index)
    read, padded = [], []
    for batch in batches:
        place = np.arange(lengths[batch[0]])
        held = np.array([lengths[i] for i in batch])[:, None]
        read.append((starts[batch][:, None] + np.minimum(place, held - 1)).ravel())
        padded.append((place >= held).ravel())
    rows, padding = np.concatenate(read), np.concatenate(padded)
    rows = rows if tokens is None else tokens[rows]
    shapes = tuple((len(batch), lengths[batch[0]]) for batch in batches)
    return _layout(shapes, rows, np.flatnonzero(~padding), device)


def _layout(shapes: tuple[tuple[int, int], ...], rows: Int64Array, real: Int64Array, device: torch.device) -> Layout:
    """`real` are the places that are not padding."""
    by_token = real[rows[real].argsort(kind="stable")]
    counts = np.bincount(rows[real])
    first = np.cumsum(counts) - counts
    places = by_token[first]
    unread = np.ones(len(rows), np.bool_)
    unread[places] = False

    def put(array: Int64Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    copies = []
    for n in np.unique(counts[counts > 1]):
        several = np.flatnonzero(counts == n)
        copies.append((put(several), put(by_token[first[several][:, None] + np.arange(n)])))
    return Layout(shapes, put(rows), put(places), put(np.flatnonzero(unread)), tuple(copies))


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
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: query `[1, heads, T, D]`, key and value `[1, kv_heads, T, D]`."""
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} wants {name!r} in attention, which packed attention has not")
    if layout is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    sizes = [count * longest for count, longest in layout.shapes]
    # What a query's copies say is not read, so that only keys and values have gradients from several places.
    spread = (_spread(x[0].transpose(0, 1), layout, x is not query) for x in (query, key, value))
    queries, keys, values = (torch.split(x, sizes) for x in spread)
    out = []
    for shape, *batch in zip(layout.shapes, queries, keys, values, strict=True):
        q, k, v = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in batch)  # [B, heads, L, D]
        out.append(_causal(q, k, v, scaling, sliding_window).transpose(1, 2).flatten(0, 1))
    return _gather(out[0] if len(out) == 1 else torch.cat(out), layout)[None], None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    n, grouped = query.shape[2], query.shape[1] != key.shape[1]
    if window is None or n <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    place = torch.arange(n, device=query.device)
    back = place[:, None] - place[None, :]
    seen = (back >= 0) & (back < window)
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


def _spread(packed: Tensor, layout: Layout, summed: bool) -> Tensor:
    """From the pack into the batches. Nothing of the loss rests on padding, so it gives no gradient back."""
    copies = layout.copies if summed else ()
    return cast(Tensor, _Select.apply(packed, layout.rows, layout.places, None, copies))  # type: ignore[no-untyped-call]


def _gather(spread: Tensor, layout: Layout) -> Tensor:
    """From the batches back into the pack."""
    return cast(Tensor, _Select.apply(spread, layout.places, layout.rows, layout.unread, ()))  # type: ignore[no-untyped-call]
