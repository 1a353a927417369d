"""Folders of weights: whole or not at all, readable by safetensors, and the gathering goes to its end in any case."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.train import export
from agentrl.train.export import Shape, write_folder

WEIGHTS = {
    "a.weight": torch.arange(15.0).view(3, 5),
    "b": torch.arange(7.0),
    "c.weight": torch.arange(6.0).view(2, 3).t(),
}


def shapes(weights: dict[str, Tensor]) -> list[Shape]:
    return [Shape(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "x", "torch_dtype": "float64"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.safetensors").write_text("weights of the base, not to be copied")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_gathered_is_in_the_file(base: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
    write_folder(tmp_path / "out", base, shapes(weights), iter(weights.items()))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "x",
        "dtype": str(dtype).removeprefix("torch."),
    }
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_large_models_are_cut_into_files_with_an_index(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 64)
    write_folder(tmp_path / "out", base, shapes(WEIGHTS), iter(WEIGHTS.items()))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (15 + 7 + 6)
    assert len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], WEIGHTS[name])


def test_a_folder_that_cannot_be_written_takes_all_weights_and_leaves_nothing(base: Path, tmp_path: Path) -> None:
    taken = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in WEIGHTS.items():
            taken.append(name)
            yield name, tensor

    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        write_folder(tmp_path / "file" / "out", base, shapes(WEIGHTS), weights())
    assert taken == list(WEIGHTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "file"]


def test_an_empty_tensor_is_no_weight(base: Path, tmp_path: Path) -> None:
    """What a partitioned parameter looks like that nobody gathered."""
    with pytest.raises(ValueError, match="0 bytes were gathered, expected 60"):
        write_folder(tmp_path / "out", base, shapes(WEIGHTS), iter([("a.weight", torch.empty(0))]))
    assert not (tmp_path / "out").exists()
