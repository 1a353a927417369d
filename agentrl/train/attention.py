"""Attention over packed sequences: exact, without a mask, and in few calls however short the sequences are.

Sequences of about one length are read as one batch, padded on the right. Causal attention needs no mask for that: what
is real comes before what is padding and never sees it, and what the padding sees is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.errors import ConfigError

ATTENTION = "agentrl_packed"
SLACK, SLACK_SHARE = 32, 16
"""A sequence joins longer ones of `longest` tokens where it lacks at most 32 + longest / 16 of them."""


class Layout(NamedTuple):
    """Where the tokens of a pack go to be read in batches."""

    shapes: tuple[tuple[int, int], ...]
    """Of each batch: sequences, and tokens of the longest of them."""
    rows: Tensor
    """`[S]`, the token that each place of the batches reads; at padding the last of its sequence."""
    places: Tensor
    """`[T]`, the place of each token."""
    padding: Tensor
    """`[P]`, the places that are padding."""


def lay_out(lengths: Sequence[int], device: torch.device) -> Layout | None:
    """How sequences of these lengths, one after the other in a pack, are read; None where there is one alone."""
    if len(lengths) == 1:
        return None
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or longest - lengths[index] > SLACK + longest // SLACK_SHARE:
            batches.append([])
        batches[-1].append(index)
    rows, padding = [], []
    for batch in batches:
        longest = lengths[batch[0]]
        place = torch.arange(longest)
        held = torch.tensor([lengths[i] for i in batch])[:, None]
        rows.append((torch.tensor([starts[i] for i in batch])[:, None] + place.minimum(held - 1)).flatten())
        padding.append((place >= held).flatten())
    all_rows, pads = torch.cat(rows), torch.cat(padding)
    real = (~pads).nonzero().squeeze(1)
    places = torch.empty(starts[-1], dtype=torch.int64)
    places[all_rows[real]] = real
    shapes = tuple((len(batch), lengths[batch[0]]) for batch in batches)
    return Layout(shapes, all_rows.to(device), places.to(device), pads.nonzero().squeeze(1).to(device))


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
    queries, keys, values = (torch.split(_spread(x[0].transpose(0, 1), layout), sizes) for x in (query, key, value))
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
    """Rows of `x` by number. Its gradient is a selection too, since each token has one place: nothing is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor, unread: Tensor | None) -> Tensor:
        ctx.back, ctx.unread = back, unread
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        found = grad.index_select(0, ctx.back)
        return found if ctx.unread is None else found.index_fill_(0, ctx.unread, 0.0), None, None, None


def _spread(packed: Tensor, layout: Layout) -> Tensor:
    """From the pack into the batches. Nothing of the loss rests on padding, so it gives no gradient back."""
    return cast(Tensor, _Select.apply(packed, layout.rows, layout.places, None))  # type: ignore[no-untyped-call]


def _gather(spread: Tensor, layout: Layout) -> Tensor:
    """From the batches back into the pack."""
    return cast(Tensor, _Select.apply(spread, layout.places, layout.rows, layout.padding))  # type: ignore[no-untyped-call]
