"""A model's parameters as they are computed with: read or received, joined, and summed up in checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.engine.embedded.linear import CPU, Linear, computed_in
from agentrl.engine.embedded.shape import ModelShape
from agentrl.engine.weights import Shapes, check_shapes, weight_files, weight_shapes


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


def load_weights(folder: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device = CPU) -> Weights:
    """Read a folder into new tensors on `device`, of values that `dtype` can hold, as they are computed with.

    ConfigError, before anything is loaded, where it does not fit the model.
    """
    check_shapes(weight_shapes(folder), expected_shapes(shape), tied=shape.tied)
    named: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118
                named[name] = held(file.get_tensor(name), dtype, device)
    return assemble(named, shape)


def held(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy with values that `dtype` can hold, as it is computed with."""
    # A copy always: a view of a mapped file would change, or end the process, when the file does.
    return tensor.to(device=device, dtype=dtype).to(computed_in(dtype, device), copy=True)


def assemble(named: dict[str, Tensor], shape: ModelShape) -> Weights:
    """Weights of all the tensors of `expected_shapes`, which are taken out of `named` where they are joined."""
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
    data = tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()
