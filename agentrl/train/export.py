"""Weights as a Hugging Face folder that transformers, SGLang and the embedded engine load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.errors import ConfigError

SHARD_BYTES = 2 << 30
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class Shape(NamedTuple):
    """A parameter's true shape and dtype: one that ZeRO-3 partitioned reads as empty."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size when gathered."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_folder(target: Path, base: Path, shapes: Sequence[Shape], weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write `weights`, which come in the order of `shapes`, to `target` with config and tokenizer from `base`.

    `target` is there whole or not at all. An OSError is raised only after the last weight was taken: the gathering is
    collective, and the other ranks would be left alone in it.
    """
    aside = target.with_name(f".{target.name}.aside")
    failure: OSError | None = None
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        failure = error
    parts = buckets(shapes, SHARD_BYTES)
    for number, part in enumerate(parts, 1):
        found = _write_file(aside / _file(number, len(parts)), part, weights, failure is None)
        failure = failure or found
    for _ in weights:
        pass
    try:
        if failure is None:
            _describe(aside, base, parts)
            _open_to_all(aside)
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
    except OSError as error:
        failure = error
    if failure is not None:
        shutil.rmtree(aside, ignore_errors=True)
        raise failure


def _write_file(
    path: Path, part: Sequence[Shape], weights: Iterator[tuple[str, Tensor]], wanted: bool
) -> OSError | None:
    """One safetensors file, each tensor written as it comes: neither a file's tensors nor their bytes are held.

    Takes `part` from `weights` whatever happens; what went wrong is returned.
    """
    left = iter(part)
    try:
        if wanted:
            with path.open("wb") as file:
                file.write(_header(part))
                for shape in left:
                    _, tensor = next(weights)
                    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                    if len(data) != shape.nbytes:
                        raise ValueError(f"{shape.name}: {len(data)} bytes were gathered, expected {shape.nbytes}")
                    file.write(data.numpy().data)
    except OSError as error:
        for _ in left:
            next(weights)
        return error
    for _ in left:
        next(weights)
    return None


def _header(part: Sequence[Shape]) -> bytes:
    """https://github.com/huggingface/safetensors: a length in 8 bytes, then JSON, padded to keep tensors aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for shape in part:
        end = at + shape.nbytes
        entries[shape.name] = {"dtype": _DTYPES[shape.dtype], "shape": shape.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_names(base: Path, shapes: Sequence[Shape]) -> None:
    """ConfigError where the weights' names or shapes are not those of the folder they were loaded from.

    An engine ignores a name that it does not know and would go on with old weights.
    """
    theirs: dict[str, tuple[int, ...]] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            theirs |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    ours = {s.name: s.shape for s in shapes}
    if theirs and (odd := sorted(name for name in ours if theirs.get(name) != ours[name])):
        raise ConfigError(
            f"{len(odd)} weights of the loaded model, e.g. {odd[0]!r} {ours[odd[0]]}, are not in {base} under that "
            "name and shape: publishing them would not reach an engine; this architecture is not supported"
        )


def buckets(shapes: Sequence[Shape], limit: int) -> list[list[Shape]]:
    """Runs of shapes of at most `limit` bytes each; one that is larger comes alone."""
    parts: list[list[Shape]] = [[]]
    size = 0
    for shape in shapes:
        if parts[-1] and size + shape.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(shape)
        size += shape.nbytes
    return parts


def _file(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _describe(folder: Path, base: Path, parts: Sequence[Sequence[Shape]]) -> None:
    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    config = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(parts[0][0].dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if len(parts) > 1:
        names = {s.name: _file(i, len(parts)) for i, part in enumerate(parts, 1) for s in part}
        index = {"metadata": {"total_size": sum(s.nbytes for part in parts for s in part)}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _open_to_all(folder: Path) -> None:
    """An engine may run as another user."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
