"""The forward pass equals transformers' own for every family, cached and packed; weights are checked first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from agentrl.engine.embedded import linear
from agentrl.engine.embedded.model import Chunk, KVCache, Model
from agentrl.engine.embedded.parameters import Weights, checksums, load_weights
from agentrl.engine.embedded.shape import read_shape, rope_tables
from agentrl.errors import ConfigError
from tests.engine import oracle
from tests.engine.kit import edit_json, vivid_model

TOKENS = [int(t) for t in torch.randint(0, 250, (48,), generator=torch.Generator().manual_seed(0))]


def _model(folder: Path, rows: int = 3) -> tuple[Model, Weights]:
    shape = read_shape(folder)
    model = Model(shape, KVCache(shape, rows, torch.float32), *rope_tables(folder, shape, shape.context), torch.float32)
    return model, load_weights(folder, shape, torch.float32)


def _worst(got: torch.Tensor, folder: Path, tokens: list[int]) -> float:
    want = torch.from_numpy(oracle.logprobs(folder, tokens)[-1])
    return float((got.log_softmax(-1) - want).abs().max())


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ({"family": "llama"}, {}),
        ({"family": "llama", "tie": False, "kv_heads": 2}, {}),
        pytest.param({"family": "qwen2", "kv_heads": 1}, {}, marks=pytest.mark.slow),
        ({"family": "qwen3", "kv_heads": 2}, {}),
        pytest.param(
            {"family": "llama"}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"family": "llama"},
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["llama", "llama-gqa-untied", "qwen2", "qwen3", "rope-linear", "rope-llama3"],
)
@torch.inference_mode()
def test_forward_equals_transformers(tmp_path: Path, shape: dict[str, Any], changes: dict[str, Any]) -> None:
    folder = vivid_model(tmp_path / "m", 1, **shape)
    edit_json(folder / "config.json", **changes)
    model, weights = _model(folder)
    a, b = TOKENS[:40], TOKENS[8:]
    packed = model.prefill(weights, torch.tensor(a[:20] + b[:7]), [Chunk(0, 0, 20), Chunk(1, 0, 7)])
    worst = max(_worst(packed[0], folder, a[:20]), _worst(packed[1], folder, b[:7]))
    behind = model.prefill(weights, torch.tensor(a[20:30]), [Chunk(0, 20, 10)])
    worst = max(worst, _worst(behind[0], folder, a[:30]))
    for i in range(5):
        step = model.decode(weights, torch.tensor([a[30 + i], b[7 + i]]), torch.tensor([30 + i, 7 + i]))
        worst = max(worst, _worst(step[0], folder, a[: 31 + i]), _worst(step[1], folder, b[: 8 + i]))
    assert worst < 1e-4


@torch.inference_mode()
def test_packed_weights_give_the_same_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = vivid_model(tmp_path / "m", 1, family="qwen2")
    sums = checksums(_model(folder)[1])
    monkeypatch.setattr(linear, "_SMALLEST", 1)
    model, weights = _model(folder)
    logits = model.prefill(weights, torch.tensor(TOKENS[:20]), [Chunk(0, 0, 20)])
    worst = _worst(logits[0], folder, TOKENS[:20])
    for i in range(20, 24):
        step = model.decode(weights, torch.tensor([TOKENS[i]]), torch.tensor([i]))
        worst = max(worst, _worst(step[0], folder, TOKENS[: i + 1]))
    assert worst < 1e-4
    assert checksums(weights) == sums


def test_bfloat16_holds_rounded_values(tmp_path: Path) -> None:
    folder = vivid_model(tmp_path / "m", 0)
    weights = load_weights(folder, read_shape(folder), torch.bfloat16)
    given = torch.from_numpy(load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
    assert weights.embed.dtype is linear.computed_in(torch.bfloat16)
    assert torch.equal(weights.embed, given.bfloat16().to(weights.embed.dtype))


def test_a_tied_head_follows_the_embedding(tmp_path: Path) -> None:
    folder = vivid_model(tmp_path / "m", 0)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    shape = read_shape(folder)
    first = load_weights(folder, shape, torch.float32)
    assert torch.equal(first.head.weight, first.embed)
    stale = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 0}
    save_file(stale, folder / "model.safetensors")
    assert load_weights(folder, shape, torch.float32).head.weight.abs().max() > 0
    assert checksums(load_weights(folder, shape, torch.float32)) == checksums(first)


@pytest.mark.parametrize("damage", ["unknown", "missing", "shape"])
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, damage: str) -> None:
    folder = vivid_model(tmp_path / "m", 0)
    shape = read_shape(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "unknown":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors[name]
    elif damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][1:].copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="up_proj"):
        load_weights(folder, shape, torch.float32)


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "gelu"}, {"use_sliding_window": True, "sliding_window": 8}, {"model_type": "mamba"}]
)
def test_what_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = vivid_model(tmp_path / "m", 0)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match="sglang"):
        read_shape(folder)


def test_an_unknown_rope_is_refused(tmp_path: Path) -> None:
    folder = vivid_model(tmp_path / "m", 0)
    edit_json(folder / "config.json", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(ConfigError, match="yarn"):
        rope_tables(folder, read_shape(folder), 8)


def test_the_cache_grows_and_keeps_its_content(tmp_path: Path) -> None:
    cache = KVCache(read_shape(vivid_model(tmp_path / "m", 0)), 2, torch.float32)
    cache.k[:, 1, :, 5] = 3
    cache.reserve(cache.capacity + 1)
    cache.swap(0, 0, 1, 6)
    assert cache.k[:, 0, :, 5].eq(3).all()
