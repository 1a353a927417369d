"""The numbers of a config.json that generation needs, and its rotary positions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.engine.weights import model_config, model_limits
from agentrl.errors import ConfigError

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
