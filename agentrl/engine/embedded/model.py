"""The forward pass of a Llama-type language model over a KV cache, for generation.

Covers RMSNorm, rotary positions, grouped-query attention, SwiGLU, and what Qwen2 (biases) and Qwen3 (normalised queries
and keys) add; agrees with transformers' own forward. Letters: T tokens, D hidden, H query heads, G key-value heads,
E head width, R cache rows, C cache capacity, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.engine.embedded.linear import CPU
from agentrl.engine.embedded.parameters import Weights
from agentrl.engine.embedded.shape import ModelShape

_RESERVED = 8 << 30


class KVCache:
    """Keys and values of every row. Zeros at first: a masked NaN is a NaN.

    The whole context is reserved where that is at most `_RESERVED` bytes, of which the system gives only what is used.
    Beyond that the cache grows by copying, which holds generation up.
    """

    def __init__(self, shape: ModelShape, rows: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self.device = device
        self._size = (shape.layers, rows, shape.kv_heads, shape.head)
        self._dtype = dtype
        self._context = shape.context
        self.capacity = 0
        self.k = self.v = torch.zeros(0)
        self.reserve(max(64, min(shape.context, _RESERVED // (2 * math.prod(self._size) * dtype.itemsize))))

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens a row."""
        if length <= self.capacity:
            return
        capacity = max(length, min(2 * self.capacity, self._context))
        grown = [self._zeros(capacity) for _ in range(2)]
        if self.capacity:
            grown[0][:, :, :, : self.capacity] = self.k
            grown[1][:, :, :, : self.capacity] = self.v
        self.k, self.v, self.capacity = grown[0], grown[1], capacity

    def _zeros(self, capacity: int) -> Tensor:
        layers, rows, heads, width = self._size
        if self.device.type != "cpu":
            return torch.zeros(layers, rows, heads, capacity, width, dtype=self._dtype, device=self.device)
        # numpy's zeros are pages that the system fills when they are first written; torch's are written at once.
        raw = np.zeros(math.prod(self._size) * capacity * self._dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(self._dtype).view(layers, rows, heads, capacity, width)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row."""
        for cache in (self.k, self.v):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def swap(self, a: int, length_a: int, b: int, length_b: int) -> None:
        """Exchange two rows that hold so many tokens."""
        for cache in (self.k, self.v):
            kept = cache[:, a, :, :length_a].clone()
            cache[:, a, :, :length_b] = cache[:, b, :, :length_b]
            cache[:, b, :, :length_a] = kept

    def clear(self, row: int) -> None:
        """Zero a row."""
        self.k[:, row] = 0
        self.v[:, row] = 0


class Chunk(NamedTuple):
    """Tokens to prefill into a cache row behind the `start` it already holds."""

    row: int
    start: int
    n: int


class Model:
    """The forward pass. Holds no weights: they are an argument, so that a swap is one assignment between two steps."""

    def __init__(self, shape: ModelShape, cache: KVCache, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> None:
        self.shape = shape
        self.cache = cache
        self._device = cache.device
        self._cos, self._sin = cos.to(self._device, dtype), sin.to(self._device, dtype)
        self._dtype = dtype
        self._scale = shape.head**-0.5

    def decode(self, weights: Weights, tokens: Tensor, lengths: Tensor, running: Tensor | None = None) -> Tensor:
        """One token for each of the rows 0..n-1, behind the `lengths` [n] they hold; logits `[n, V]` float32.

        With `running` [m] of these rows alone: the others go along, but nothing is written for them.
        """
        n, longest = tokens.numel(), int(lengths.max()) + 1
        self.cache.reserve(longest)
        tokens, lengths = tokens.to(self._device), lengths.to(self._device)
        holes = running is not None and running.numel() < n
        rows = running.to(self._device) if running is not None and holes else torch.arange(n, device=self._device)
        places = lengths[rows]
        mask = torch.zeros(n, 1, 1, longest, dtype=self._dtype, device=self._device)
        later = torch.arange(longest, device=self._device) > lengths[:, None]
        mask.masked_fill_(later[:, None, None], float("-inf"))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.k[layer], self.cache.v[layer]
            keys[rows, :, places] = k[rows] if holes else k
            values[rows, :, places] = v[rows] if holes else v
            # Query heads that share a key head stand where a sequence of queries would: [n, G, H/G, E], no copy.
            q = q.reshape(n, self.shape.kv_heads, -1, self.shape.head)
            return F.scaled_dot_product_attention(
                q, keys[:n, :, :longest], values[:n, :, :longest], attn_mask=mask, scale=self._scale
            ).reshape(n, -1)

        hidden = self._blocks(weights, tokens, lengths, attend)
        return self._logits(weights, hidden[rows] if holes else hidden)

    def prefill(self, weights: Weights, tokens: Tensor, chunks: list[Chunk]) -> Tensor:
        """Fill rows with the chunks' tokens, packed in one pass; logits `[chunks, V]` after each one's last."""
        self.cache.reserve(max(c.start + c.n for c in chunks))
        tokens = tokens.to(self._device)
        positions = torch.cat([torch.arange(c.start, c.start + c.n) for c in chunks]).to(self._device)
        ends = torch.tensor([c.n for c in chunks], device=self._device).cumsum(0) - 1
        masks = [self._causal(c) for c in chunks]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs, at = [], 0
            for chunk, mask in zip(chunks, masks, strict=True):
                end = at + chunk.n
                # Of the last layer the chunks' last tokens are read, which see all before them.
                asking, seen = (q[at:end], mask) if layer < self.shape.layers - 1 else (q[end - 1 : end], None)
                outs.append(self._attend_chunk(layer, chunk, asking, seen, k[at:end], v[at:end]))
                at = end
            return torch.cat(outs)

        return self._logits(weights, self._blocks(weights, tokens, positions, attend, ends))

    def _attend_chunk(self, layer: int, chunk: Chunk, q: Tensor, mask: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
        end, groups, n = chunk.start + chunk.n, self.shape.heads // self.shape.kv_heads, len(q)
        keys, values = self.cache.k[layer, chunk.row], self.cache.v[layer, chunk.row]
        keys[:, chunk.start : end] = k.transpose(0, 1)
        values[:, chunk.start : end] = v.transpose(0, 1)
        # [1, G, (H/G)·n, E] against [1, G, end, E]
        q = q.view(n, self.shape.kv_heads, groups, self.shape.head).permute(1, 2, 0, 3)
        q = q.reshape(1, self.shape.kv_heads, groups * n, self.shape.head)
        out = F.scaled_dot_product_attention(
            q, keys[None, :, :end], values[None, :, :end], attn_mask=mask, scale=self._scale
        )
        out = out.view(self.shape.kv_heads, groups, n, self.shape.head).permute(2, 0, 1, 3)
        return out.reshape(n, -1)

    def _causal(self, chunk: Chunk) -> Tensor:
        size = (chunk.n, chunk.start + chunk.n)
        mask = torch.full(size, float("-inf"), dtype=self._dtype, device=self._device)
        return mask.triu_(chunk.start + 1).repeat(self.shape.heads // self.shape.kv_heads, 1)

    def _blocks(
        self, weights: Weights, tokens: Tensor, positions: Tensor, attend: Any, ends: Tensor | None = None
    ) -> Tensor:
        """Normalised states `[T, D]`; with `ends`, of these tokens alone, for which `attend` asks in the last layer."""
        shape, (width,) = self.shape, (self.shape.hidden,)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]  # [T, 1, E]
        n_qk, total = shape.heads + shape.kv_heads, shape.heads + 2 * shape.kv_heads
        x = weights.embed[tokens]  # [T, D]
        for i, layer in enumerate(weights.layers):
            qkv = layer.qkv(F.rms_norm(x, (width,), layer.norm1, shape.eps))
            qkv = qkv.view(-1, total, shape.head)
            qk, v = qkv[:, :n_qk], qkv[:, n_qk:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (shape.head,), None, shape.eps) * layer.qk_norm
            first, second = qk.chunk(2, -1)
            qk = qk * cos + torch.cat((-second, first), -1) * sin
            attended = attend(i, qk[:, : shape.heads], qk[:, shape.heads :], v)
            if ends is not None and i == shape.layers - 1:
                x = x[ends]
            x = x + layer.o(attended)
            gate, up = layer.gate_up(F.rms_norm(x, (width,), layer.norm2, shape.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return F.rms_norm(x, (width,), weights.norm, shape.eps)

    def _logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        return weights.head(hidden).float()
