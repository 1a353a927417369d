"""Packed attention = attention of each sequence alone, with its gradients, however the sequences are batched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.train.attention import SLACK, SLACK_SHARE, lay_out, packed_attention
from agentrl.train.prefix import share

CPU = torch.device("cpu")
LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 130)), min_size=1, max_size=9)


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None = None) -> Tensor:
    found, _ = packed_attention(
        torch.nn.Identity(), q, k, v, None, layout=lay_out(lengths, None, CPU), sliding_window=window
    )
    return found[0]


def alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    parts = zip(*(torch.split(x, lengths, 2) for x in (q, k, v)), strict=True)
    found = [F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True) for a, b, c in parts]
    return torch.cat(found, 2).transpose(1, 2)[0]


@settings(deadline=None)
@given(LENGTHS)
def test_batches_are_as_each_alone(lengths: list[int]) -> None:
    total = sum(lengths)
    torch.manual_seed(total)
    leaves = [torch.randn(1, heads, total, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    # Padding that leaked would be seen: one sequence is far louder than the others.
    for leaf in leaves:
        leaf[:, :, -lengths[-1] :] *= 30
    factors = torch.randn(total, 4, 8, dtype=torch.float64)
    found = []
    for attention in (attend, alone):
        q, k, v = (x.clone().requires_grad_() for x in leaves)
        out = attention(q, k, v, lengths)
        found.append([out, *torch.autograd.grad((out * factors).sum(), (q, k, v))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@settings(deadline=None)
@given(LENGTHS)
def test_every_token_has_one_place_and_little_is_padding(lengths: list[int]) -> None:
    layout = lay_out(lengths, None, CPU)
    assert torch.equal(layout.rows[layout.places], torch.arange(sum(lengths)))
    real = torch.cat([layout.places, layout.unread])
    assert torch.equal(real.sort().values, torch.arange(sum(n * longest for n, longest in layout.shapes)))
    for count, longest in layout.shapes:
        assert count
        assert longest in lengths
    assert len(layout.unread) <= sum(n * (SLACK + longest // SLACK_SHARE) for n, longest in layout.shapes)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=2, max_size=9))
def test_tokens_that_sequences_share_are_as_each_alone(pack: list[list[int]]) -> None:
    tokens, lengths = np.array(list(itertools.chain(*pack))), [len(s) for s in pack]
    shared = share(tokens, lengths, np.arange(len(tokens)))
    whole, place = torch.from_numpy(shared.sequences), torch.from_numpy(shared.place)
    torch.manual_seed(len(tokens))
    leaves = [torch.randn(1, heads, len(shared.computed), 8, dtype=torch.float64) for heads in (4, 2, 2)]
    factors = torch.randn(len(tokens), 4, 8, dtype=torch.float64)
    found = []
    for together in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in leaves)
        if together:
            layout = lay_out(shared.lengths, shared.sequences, CPU)
            out = packed_attention(torch.nn.Identity(), q, k, v, None, layout=layout)[0][0][place]
        else:
            out = alone(q[:, :, whole], k[:, :, whole], v[:, :, whole], lengths)
        found.append([out, *torch.autograd.grad((out * factors).sum(), (q, k, v))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=9), st.data())
def test_the_few_that_ask_are_as_among_all(pack: list[list[int]], data: st.DataObject) -> None:
    tokens, lengths = np.array(list(itertools.chain(*pack))), [len(s) for s in pack]
    read = np.array(data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=9)))
    window = data.draw(st.sampled_from([None, 3, 20]))
    shared = share(tokens, lengths, read)
    place = torch.from_numpy(shared.place[read])
    layout = lay_out(shared.lengths, shared.sequences, CPU, place.numpy())
    assert layout.queries is not None
    for (_, longest), at in zip(layout.shapes, layout.queries.at, strict=True):
        assert at is None or 2 * at.shape[1] <= longest
    torch.manual_seed(len(tokens))
    leaves = [torch.randn(1, heads, len(shared.computed), 8, dtype=torch.float64) for heads in (4, 2, 2)]
    factors = torch.randn(len(read), 4, 8, dtype=torch.float64)
    found = []
    for queries in (layout.queries, None):
        q, k, v = (x.clone().requires_grad_() for x in leaves)
        out, _ = packed_attention(
            torch.nn.Identity(), q, k, v, None, layout=layout, queries=queries, sliding_window=window
        )
        found.append([out[0][place], *torch.autograd.grad((out[0][place] * factors).sum(), (q, k, v))])
    for few, among_all in zip(*found, strict=True):
        torch.testing.assert_close(few, among_all, atol=1e-9, rtol=1e-9)


def test_sequences_of_one_length_are_one_batch() -> None:
    layout = lay_out([58] * 64, None, CPU)
    assert layout.shapes == ((64, 58),)
    assert len(layout.unread) == 0
    mixed = lay_out([2000, 40, 1900, 60], None, CPU)
    assert mixed.shapes == ((2, 2000), (2, 60))


def test_sliding_window() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    found = attend(q, k, v, [3, 8], window=4)
    for start, end in ((0, 3), (3, 11)):
        for at in range(start, end):
            low = max(start, at - 3)
            keys, values = (x[:, :, low : at + 1].repeat_interleave(2, 1) for x in (k, v))
            weights = (q[:, :, at : at + 1] @ keys.transpose(2, 3) / 8**0.5).softmax(-1)
            torch.testing.assert_close(found[at], (weights @ values)[0, :, 0], atol=1e-5, rtol=1e-5)


def test_what_packed_attention_lacks_is_refused() -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ConfigError, match="softcap"):
        packed_attention(torch.nn.Identity(), x, x, x, None, softcap=30.0)
