"""What a folder of weights holds, read from the headers of its safetensors files: no torch, no tensor is loaded.

A real server ignores an unknown tensor name with success and dies of a wrong shape, so both are refused before the
folder is offered to it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]


class Limits(NamedTuple):
    """What a model can be sent: token ids below `vocab_size`, fewer tokens than `context_length`."""

    vocab_size: int
    context_length: int


def model_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; ConfigError where it is missing or damaged."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no model folder: {path.name} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, expected an object")
    return config


def model_limits(folder: Path, context_length: int | None = None) -> Limits:
    """The limits of the model in `folder`, its context cut to `context_length` where that is given."""
    config = model_config(folder)
    try:
        vocab, longest = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except KeyError as error:
        raise ConfigError(f"{folder / 'config.json'} lacks {error}") from error
    if context_length is not None and context_length > longest:
        raise ConfigError(f"context_length {context_length} is longer than the model's {longest}: lower it")
    return Limits(vocab, context_length or longest)


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files; ConfigError where there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no *.safetensors file: expected a model folder in Hugging Face form")
    return files


def weight_shapes(folder: Path) -> Shapes:
    """Name → shape of every tensor in the folder."""
    shapes: Shapes = {}
    for path in weight_files(folder):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"])
    return shapes


def _header(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 2 <= length <= size - 8:
            raise ConfigError(f"{path} is not a whole safetensors file: its header claims {length} of {size} bytes")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise ConfigError(f"{path} has a damaged safetensors header: {error}") from error
    ends = [e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"]
    if max(ends, default=0) != size - 8 - length:
        raise ConfigError(f"{path} is cut short: {size} bytes, its header needs {8 + length + max(ends, default=0)}")
    return header


def check_shapes(new: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """ConfigError unless `new` names the same tensors with the same shapes; a tied output head may be left out."""
    optional = {"lm_head.weight"} if tied else set()
    missing = sorted(set(expected) - set(new) - optional)
    unknown = sorted(set(new) - set(expected) - optional)
    if missing or unknown:
        raise ConfigError(
            f"the weights do not fit the model: missing {missing[:3]} ({len(missing)}), unknown {unknown[:3]} "
            f"({len(unknown)})"
        )
    for name, shape in expected.items():
        if name in new and tuple(new[name]) != tuple(shape):
            raise ConfigError(f"tensor {name} has shape {tuple(new[name])}, the model needs {tuple(shape)}")
