"""Checkpoint folders: written aside, made whole, then renamed. The rename is the only commit point. Free of torch.

<checkpoints>/step-0000012/manifest.json                   what is here, with the size and CRC-32 of every file
                           state-00000-of-00002.safetensors …   master weights and moments, one file a rank
                           model/                           the weights in Hugging Face form, with the tokenizer
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from agentrl.errors import ConfigError, RunError
from agentrl.types import Version

MANIFEST = "manifest.json"
_PREFIX, _ASIDE = "step-", ".aside-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint's manifest says. `cursor` is the conductor's; `state` is the backend's."""

    path: Path
    step: int
    version: str
    take: int
    cursor: Mapping[str, Any]
    world: int
    state: Mapping[str, Any]
    files: Mapping[str, tuple[int, int]]
    """Relative path → (bytes, CRC-32)."""

    @property
    def model(self) -> Path:
        """The weights in Hugging Face form."""
        return self.path / "model"

    @property
    def number(self) -> int:
        """The version's number."""
        return Version.parse(self.version).number


class _Body(BaseModel):
    """The manifest as it is on disk: `crc` is of all the rest, and absent in what older versions wrote."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: NonNegativeInt
    version: str
    take: int
    cursor: dict[str, Any]
    world: PositiveInt
    state: dict[str, Any]
    files: dict[str, tuple[NonNegativeInt, NonNegativeInt]]
    crc: int | None = None


def state_file(rank: int, world: int) -> str:
    """The file of `rank` among `world`."""
    return f"state-{rank:05d}-of-{world:05d}.safetensors"


def folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or will be."""
    return checkpoints / f"{_PREFIX}{step:07d}"


def aside(checkpoints: Path, step: int) -> Path:
    """Where it is put together."""
    return checkpoints / f"{_ASIDE}{step:07d}"


def commit(checkpoints: Path, step: int, content: Mapping[str, Any], *, keep: int) -> Checkpoint:
    """Describe and rename the folder put together at `aside`; then remove all but the newest `keep`.

    `content` has the fields of `Checkpoint` but `path`, `step` and `files`. RunError where a rank's part is missing.
    """
    source, target = aside(checkpoints, step), folder(checkpoints, step)
    files = {
        str(path.relative_to(source)): (path.stat().st_size, _crc(path))
        for path in sorted(source.rglob("*"))
        if path.is_file()
    }
    if missing := _missing_parts(files, int(content["world"])):
        raise RunError(f"checkpoint of step {step}: {source} has no {missing[0]}, so it is not made whole")
    body = {"step": step, **content, "files": files}
    with (source / MANIFEST).open("wb") as out:
        out.write(orjson.dumps({**body, "crc": _seal(body)}, option=orjson.OPT_INDENT_2))
    sync(source)
    if target.exists():
        # Of an abandoned continuation that came as far as this one: this one's weights are the surviving ones.
        shutil.rmtree(target)
    source.rename(target)
    _sync_folder(checkpoints)
    _retain(checkpoints, step, keep)
    return Checkpoint(path=target, **body)


def sync(root: Path) -> None:
    """Force every file below `root`, and their folders, to the disk."""
    for path in [*root.rglob("*"), root]:
        _sync_folder(path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _retain(checkpoints: Path, step: int, keep: int) -> None:
    """Those after `step` go too: damaged ones, or of a continuation that was given up. They must not outlive this."""
    found = _folders(checkpoints)
    later = [path for path in found if _step(path) > step]
    for old in later + found[len(later) + keep :]:
        shutil.rmtree(old, ignore_errors=True)
    for torn in checkpoints.glob(f"{_ASIDE}*"):
        shutil.rmtree(torn, ignore_errors=True)


def _folders(checkpoints: Path) -> list[Path]:
    """Newest first."""
    if not checkpoints.is_dir():
        return []
    found = [p for p in checkpoints.iterdir() if p.is_dir() and p.name.startswith(_PREFIX)]
    return sorted((p for p in found if p.name.removeprefix(_PREFIX).isdecimal()), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _missing_parts(files: Mapping[str, Any], world: int) -> list[str]:
    return [name for rank in range(world) if (name := state_file(rank, world)) not in files]


def _seal(body: Mapping[str, Any]) -> int:
    return zlib.crc32(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))


def read(path: Path, *, thorough: bool = True) -> Checkpoint:
    """The checkpoint at `path`; ConfigError says what is missing or damaged. `thorough` reads all the bytes."""
    try:
        body = _Body.model_validate_json((path / MANIFEST).read_bytes())
        Version.parse(body.version)
        fields = body.model_dump(exclude={"crc"})
        whole = body.crc is None or body.crc == _seal(fields)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"checkpoint {path} has no readable {MANIFEST} ({error}): use an earlier one") from error
    found = Checkpoint(path=path, **fields)
    if not whole:
        raise ConfigError(f"checkpoint {path} is damaged: {MANIFEST} has another checksum; use an earlier one")
    if missing := _missing_parts(found.files, found.world):
        raise ConfigError(f"checkpoint {path} is torn: {MANIFEST} names no {missing[0]}; use an earlier one")
    for name, (size, crc) in found.files.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else -1
        if actual != size:
            raise ConfigError(
                f"checkpoint {path} is torn: {name} has {actual} bytes, expected {size}; use an earlier one"
            )
        if thorough and _crc(file) != crc:
            raise ConfigError(f"checkpoint {path} is damaged: {name} has another checksum; use an earlier one")
    return found


def newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and why newer ones were passed over."""
    refused: list[str] = []
    for path in _folders(checkpoints):
        try:
            return read(path), refused
        except ConfigError as error:
            refused.append(str(error))
    return None, refused


def oldest(checkpoints: Path) -> Checkpoint | None:
    """The oldest that could be gone back to, by the sizes of its files; a damaged one is passed over."""
    for path in reversed(_folders(checkpoints)):
        try:
            return read(path, thorough=False)
        except ConfigError:
            continue
    return None


def disk_error(path: Path, error: OSError) -> RunError:
    """A failed write as an error that says where, why and what to do."""
    where = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(where).free
    return RunError(
        f"{path} could not be written: {error} ({free / 1e6:.0f} MB free there); nothing half-written is taken for "
        "whole; make room or choose another folder, then continue with --resume"
    )


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
