"""A Llama-type language model for generation: the weights of a Hugging Face folder and a forward pass over a KV cache.

Covers RMSNorm, rotary positions, grouped-query attention, SwiGLU, and what Qwen2 (biases) and Qwen3 (normalised queries
and keys) add; agrees with transformers' own forward. Letters: T tokens, D hidden, H query heads, G key-value heads,
E head width, R cache rows, C cache capacity, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from agentrl.engine.embedded.linear import Linear, computed_in
from agentrl.engine.weights import Shapes, check_shapes, model_config, model_limits, weight_files, weight_shapes
from agentrl.errors import ConfigError

_RESERVED = 8 << 30
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a config.json that generation needs."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    eps: float
    tied: bool
    context: int
    intermediate: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos: frozenset[int]


def read_shape(folder: Path, context_length: int | None = None) -> ModelShape:
    """The model's shape, its context cut to `context_length`; ConfigError for what this engine does not compute."""
    config = model_config(folder)
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(
            f"model_type {family!r} in {folder} is not one of {_FAMILIES}, which the embedded engine computes: "
            "use engine.kind = 'sglang'"
        )
    act = config.get("hidden_act", "silu")
    window = config.get("sliding_window") if config.get("use_sliding_window", family == "mistral") else None
    if act != "silu" or window is not None:
        raise ConfigError(
            f"hidden_act {act!r}, sliding_window {window!r} in {folder}: the embedded engine computes 'silu' with full "
            "attention only; use engine.kind = 'sglang'"
        )
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    bias = bool(config.get("attention_bias", False))
    return ModelShape(
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head=int(config.get("head_dim") or hidden // heads),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        context=model_limits(folder, context_length).context_length,
        intermediate=int(config["intermediate_size"]),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos=_eos(folder, config),
    )


def _eos(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    found: set[int] = set()
    for ids in (config.get("eos_token_id"), generation.get("eos_token_id")):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)


def rope_tables(folder: Path, shape: ModelShape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin `[length, E]`, float32; types "default", "linear" and "llama3" as transformers defines them."""
    config = model_config(folder)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    inverse = 1.0 / theta ** (torch.arange(0, shape.head, 2, dtype=torch.int64).float() / shape.head)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        inverse = inverse / float(rope["factor"])
    elif kind == "llama3":
        inverse = _llama3(inverse, rope)
    elif kind != "default":
        raise ConfigError(f"rope_type {kind!r} in {folder} is not computed by the embedded engine: use 'sglang'")
    angles = torch.outer(torch.arange(length).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def _llama3(inverse: Tensor, rope: dict[str, Any]) -> Tensor:
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    old = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = ((old / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse


class Layer(NamedTuple):
    """One block; query, key and value projections are one matrix, gate and up another."""

    norm1: Tensor
    qkv: Linear  # [(H+2G)·E, D]
    qk_norm: Tensor | None  # [H+G, E]
    o: Linear
    norm2: Tensor
    gate_up: Linear  # [2I, D]
    down: Linear


class Weights(NamedTuple):
    """One version of the model's parameters."""

    embed: Tensor  # [V, D]
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear  # [V, D]; the embedding itself where tied


def expected_shapes(shape: ModelShape) -> Shapes:
    """Name → shape of every parameter the model has."""
    d, e, i = shape.hidden, shape.head, shape.intermediate
    shapes: Shapes = {"model.embed_tokens.weight": (shape.vocab, d), "model.norm.weight": (d,)}
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab, d)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,)}
        for name, rows in (("q", shape.heads * e), ("k", shape.kv_heads * e), ("v", shape.kv_heads * e)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, d)
            if shape.qkv_bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[at + "self_attn.o_proj.weight"] = (d, shape.heads * e)
        if shape.o_bias:
            shapes[at + "self_attn.o_proj.bias"] = (d,)
        if shape.qk_norm:
            shapes |= {at + "self_attn.q_norm.weight": (e,), at + "self_attn.k_norm.weight": (e,)}
        for name, size in (("gate", (i, d)), ("up", (i, d)), ("down", (d, i))):
            shapes[f"{at}mlp.{name}_proj.weight"] = size
            if shape.mlp_bias:
                shapes[f"{at}mlp.{name}_proj.bias"] = size[:1]
    return shapes


def load_weights(folder: Path, shape: ModelShape, dtype: torch.dtype) -> Weights:
    """Read a folder into new tensors of values that `dtype` can hold, in the precision that is computed in.

    ConfigError, before anything is loaded, where it does not fit the model.
    """
    compute = computed_in(dtype)
    check_shapes(weight_shapes(folder), expected_shapes(shape), tied=shape.tied)
    named: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(str(path), "pt") as file:
            # Cloned: a view of the mapped file would change, or end the process, when the file does.
            for name in file.keys():  # noqa: SIM118
                named[name] = file.get_tensor(name).to(dtype).to(compute, copy=True)
    embed = named["model.embed_tokens.weight"]
    layers = tuple(_layer(named, f"model.layers.{i}.", shape) for i in range(shape.layers))
    head = Linear(embed if shape.tied else named.pop("lm_head.weight"))
    return Weights(embed, layers, named["model.norm.weight"], head)


def _layer(named: dict[str, Tensor], at: str, shape: ModelShape) -> Layer:
    attention = at + "self_attn."

    def joined(prefix: str, names: str) -> Linear:
        # Taken out: what is packed or joined is not kept a second time.
        weights = [named.pop(f"{prefix}{name}_proj.weight") for name in names.split()]
        biases = [named[key] for key in (f"{prefix}{name}_proj.bias" for name in names.split()) if key in named]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return Linear(weight, torch.cat(biases) if biases else None)

    qk_norm = None
    if shape.qk_norm:
        norms = [named[attention + "q_norm.weight"]] * shape.heads + [
            named[attention + "k_norm.weight"]
        ] * shape.kv_heads
        qk_norm = torch.stack(norms)
    return Layer(
        norm1=named[at + "input_layernorm.weight"],
        qkv=joined(attention, "q k v"),
        qk_norm=qk_norm,
        o=joined(attention, "o"),
        norm2=named[at + "post_attention_layernorm.weight"],
        gate_up=joined(at + "mlp.", "gate up"),
        down=joined(at + "mlp.", "down"),
    )


def checksums(weights: Weights) -> dict[str, str]:
    """A checksum a parameter, joined ones together."""
    named = {
        "model.embed_tokens.weight": weights.embed,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head.weight,
    }
    for i, layer in enumerate(weights.layers):
        for key, value in layer._asdict().items():
            at = f"model.layers.{i}.{key}"
            named |= {at: value} if isinstance(value, Tensor) else {}
            named |= {at: value.weight} if isinstance(value, Linear) else {}
            named |= {f"{at}.bias": value.bias} if isinstance(value, Linear) and value.bias is not None else {}
    return {name: _checksum(tensor) for name, tensor in named.items()}


def _checksum(tensor: Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class KVCache:
    """Keys and values of every row. Zeros at first: a masked NaN is a NaN.

    The whole context is reserved where that is at most `_RESERVED` bytes, of which the system gives only what is used.
    Beyond that the cache grows by copying, which holds generation up.
    """

    def __init__(self, shape: ModelShape, rows: int, dtype: torch.dtype) -> None:
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
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)
        self._dtype = dtype
        self._scale = shape.head**-0.5

    def decode(self, weights: Weights, tokens: Tensor, lengths: Tensor) -> Tensor:
        """One token for each of the rows 0..n-1, behind the `lengths` [n] they hold; logits `[n, V]` float32."""
        n, longest = tokens.numel(), int(lengths.max()) + 1
        self.cache.reserve(longest)
        rows = torch.arange(n)
        mask = torch.zeros(n, 1, 1, longest, dtype=self._dtype)
        mask.masked_fill_((torch.arange(longest) > lengths[:, None])[:, None, None], float("-inf"))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.k[layer], self.cache.v[layer]
            keys[rows, :, lengths] = k
            values[rows, :, lengths] = v
            # Query heads that share a key head stand where a sequence of queries would: [n, G, H/G, E], no copy.
            q = q.reshape(n, self.shape.kv_heads, -1, self.shape.head)
            return F.scaled_dot_product_attention(
                q, keys[:n, :, :longest], values[:n, :, :longest], attn_mask=mask, scale=self._scale
            ).reshape(n, -1)

        return self._logits(weights, self._blocks(weights, tokens, lengths, attend))

    def prefill(self, weights: Weights, tokens: Tensor, chunks: list[Chunk]) -> Tensor:
        """Fill rows with the chunks' tokens, packed in one pass; logits `[chunks, V]` after each one's last."""
        self.cache.reserve(max(c.start + c.n for c in chunks))
        positions = torch.cat([torch.arange(c.start, c.start + c.n) for c in chunks])
        masks = [self._causal(c) for c in chunks]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs, at = [], 0
            for chunk, mask in zip(chunks, masks, strict=True):
                here = slice(at, at + chunk.n)
                outs.append(self._attend_chunk(layer, chunk, mask, q[here], k[here], v[here]))
                at += chunk.n
            return torch.cat(outs)

        hidden = self._blocks(weights, tokens, positions, attend)
        ends = torch.tensor([c.n for c in chunks]).cumsum(0) - 1
        return self._logits(weights, hidden[ends])

    def _attend_chunk(self, layer: int, chunk: Chunk, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        end, groups = chunk.start + chunk.n, self.shape.heads // self.shape.kv_heads
        keys, values = self.cache.k[layer, chunk.row], self.cache.v[layer, chunk.row]
        keys[:, chunk.start : end] = k.transpose(0, 1)
        values[:, chunk.start : end] = v.transpose(0, 1)
        # [1, G, (H/G)·n, E] against [1, G, end, E]
        q = q.view(chunk.n, self.shape.kv_heads, groups, self.shape.head).permute(1, 2, 0, 3)
        q = q.reshape(1, self.shape.kv_heads, groups * chunk.n, self.shape.head)
        out = F.scaled_dot_product_attention(
            q, keys[None, :, :end], values[None, :, :end], attn_mask=mask, scale=self._scale
        )
        out = out.view(self.shape.kv_heads, groups, chunk.n, self.shape.head).permute(2, 0, 1, 3)
        return out.reshape(chunk.n, -1)

    def _causal(self, chunk: Chunk) -> Tensor:
        mask = torch.full((chunk.n, chunk.start + chunk.n), float("-inf"), dtype=self._dtype)
        return mask.triu_(chunk.start + 1).repeat(self.shape.heads // self.shape.kv_heads, 1)

    def _blocks(self, weights: Weights, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
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
            x = x + layer.o(attended)
            gate, up = layer.gate_up(F.rms_norm(x, (width,), layer.norm2, shape.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return F.rms_norm(x, (width,), weights.norm, shape.eps)

    def _logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        return weights.head(hidden).float()
