"""Rows of data from wherever they are: a file, a Python object, the Hugging Face hub.

train.jsonl              one JSON object a line                    data/train.parquet    (needs pyarrow)
my.module:rows           an iterable, or a function of none        my_rows.py:rows       the same, by file
hub:openai/gsm8k#main    a data set of the hub, with its configuration (needs datasets); also a local folder of one
sample:math_single       a few rows for the environment of that name, in the package
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.config import resolve_object
from agentrl.errors import ConfigError, DataError
from agentrl.types import Row

MOST = 1_000_000
"""More rows than this are refused unless a limit is set: they are held in memory."""

MIXED = "_env"
"""The field of a mixture's row that names its environment."""

Placed = tuple[str, Any]
"""Where a row stands (for errors), and the row."""


def load_rows(
    source: str,
    *,
    base: Path | None = None,
    limit: int | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    needed: Sequence[str] = (),
) -> list[Row]:
    """The rows of `source`, at most `limit`; relative paths count from `base`.

    `columns` renames: `{"question": "prompt"}` makes the field `prompt` of the column `question`. `split` is a hub
    data set's. A row that lacks a `needed` field, or a renamed column, is a DataError with its place.
    """
    placed = _placed(source, base or Path.cwd(), split)
    return checked_rows(placed, source, limit=limit, columns=columns, needed=needed)


def take_rows(rows: Iterable[Any], source: str, limit: int | None = None, needed: Sequence[str] = ()) -> list[Row]:
    """At most `limit` rows of an iterable, checked like `load_rows`'."""
    if not isinstance(rows, Iterable):
        raise DataError(f"data {source!r} is a {type(rows).__name__}, not an iterable of rows")
    return checked_rows(_numbered(rows, source), source, limit=limit, needed=needed)


def mix_rows(parts: Mapping[str, Sequence[Row]], weights: Mapping[str, float]) -> list[Row]:
    """One epoch of several environments' rows, in shares by weight, evenly interleaved.

    The part that is longest for its weight comes whole once; shorter ones are repeated. Each row gets the field `_env`
    with its environment's name. ConfigError where that would be more than a million rows.
    """
    total = sum(weights[name] for name in parts)
    rounds = max(len(rows) / weights[name] for name, rows in parts.items())
    count = round(rounds * total)
    if count > MOST:
        raise ConfigError(
            f"these weights make an epoch of {count} rows, more than {MOST}: limit the longest part's rows"
        )
    tagged = {name: [{**row, MIXED: name} for row in rows] for name, rows in parts.items()}
    taken = dict.fromkeys(parts, 0)
    mixed: list[Row] = []
    while len(mixed) < count:
        # The one that is furthest behind its share.
        name = min(parts, key=lambda name: (taken[name] + 1) / weights[name])
        mixed.append(tagged[name][taken[name] % len(tagged[name])])
        taken[name] += 1
    return mixed


def env_of(row: Row, default: str) -> str:
    """The name of a mixture's row's environment; `default` for other rows."""
    return str(row.get(MIXED, default))


def checked_rows(
    placed: Iterable[Placed],
    source: str,
    *,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
    needed: Sequence[str] = (),
) -> list[Row]:
    """The rows, each a mapping with every needed field."""
    rows: list[Row] = []
    for place, row in placed:
        if limit is not None and len(rows) >= limit:
            break
        if len(rows) >= MOST:
            raise ConfigError(f"data {source!r} has more than {MOST} rows: set a limit, e.g. data.train_limit = 100000")
        rows.append(_checked(row, place, columns or {}, needed))
    if not rows:
        raise DataError(f"data {source!r} has no rows")
    return rows


def _checked(row: Any, place: str, columns: Mapping[str, str], needed: Sequence[str]) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{place} is a {type(row).__name__}, not an object with fields")
    for column in columns:
        if column not in row:
            raise DataError(f"{place} has no column {column!r} to rename; it has {sorted(map(str, row))}")
    renamed = {columns.get(name, name): value for name, value in row.items()}
    if len(renamed) < len(row):
        raise DataError(f"{place}: renaming {dict(columns)} gives two columns one name")
    for name in needed:
        if renamed.get(name) is None:
            raise DataError(f"{place} has no field {name!r}; it has {sorted(map(str, renamed))}")
    return renamed


def _placed(source: str, base: Path, split: str) -> Iterator[Placed]:
    if source.startswith("hub:"):
        return _hub(source, base, split)
    if source.startswith("sample:"):
        return _jsonl(_sample(source))
    path = base / source
    if path.is_file():
        if path.suffix == ".parquet":
            return _parquet(path)
        if path.suffix in (".jsonl", ".json", ".ndjson", ""):
            return _jsonl(path)
        if path.suffix != ".py":
            raise ConfigError(f"data {source!r}: do not know how to read {path.suffix}; use .jsonl or .parquet")
    if ":" not in source:
        hint = f"; for a data set of the Hugging Face hub write 'hub:{source}'" if source.count("/") == 1 else ""
        raise ConfigError(
            f"data {source!r}: there is no file {path}, and it is not of the form 'package.module:name'{hint}"
        )
    found = resolve_object(source, base=base)
    rows = found() if callable(found) else found
    if not isinstance(rows, Iterable):
        raise DataError(f"data {source!r} is a {type(rows).__name__}, not an iterable of rows")
    return _numbered(rows, source)


def _sample(source: str) -> Path:
    folder = Path(__file__).parent / "envs" / "samples"
    path = folder / f"{source.removeprefix('sample:')}.jsonl"
    if not path.is_file():
        known = sorted(found.stem for found in folder.glob("*.jsonl"))
        raise ConfigError(f"data {source!r}: there is no such sample; there are: {', '.join(known)}")
    return path


def _numbered(rows: Iterable[Any], source: str) -> Iterator[Placed]:
    for number, row in enumerate(rows):
        yield f"row {number} of {source!r}", row


def _jsonl(path: Path) -> Iterator[Placed]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}:{number} is not JSON: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _parquet(path: Path) -> Iterator[Placed]:
    parquet = _library("pyarrow.parquet", "pyarrow")
    number = 0
    try:
        file = parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"cannot read {path}: {error}") from error


def _hub(source: str, base: Path, split: str) -> Iterator[Placed]:
    datasets = _library("datasets", "datasets")
    name, _, configuration = source.removeprefix("hub:").partition("#")
    local = base / name
    try:
        loaded = datasets.load_dataset(str(local) if local.is_dir() else name, configuration or None, split=split)
    except Exception as error:  # the library and what it downloads with raise dozens of kinds
        raise DataError(
            f"data {source!r}, split {split!r}, cannot be loaded: {type(error).__name__}: {error}; check the name, the "
            "split and the network, or download it and give its folder"
        ) from error
    return _numbered(loaded, f"{source}, split {split}")


def _library(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"this data needs {package}: pip install {package}") from error
