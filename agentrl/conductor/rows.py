"""Where rows come from: a JSONL file, a Python iterable by dotted path, or the environment itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config import resolve_object
from agentrl.errors import ConfigError, DataError
from agentrl.types import Row

MOST = 1_000_000


def load_rows(source: str, *, base: Path, limit: int | None) -> list[Row]:
    """The rows of `source`: a path of a JSONL file, or `pkg.module:object` naming an iterable or a function of none."""
    path = base / source
    if path.is_file():
        return take_rows(_jsonl(path), source, limit)
    if ":" not in source:
        raise ConfigError(f"data {source!r}: there is no file {path}, and it is not of the form 'package.module:name'")
    found = resolve_object(source, base=base)
    return take_rows(found() if callable(found) else found, source, limit)


def take_rows(rows: Iterable[Any], source: str, limit: int | None) -> list[Row]:
    """At most `limit` rows, each checked to be a mapping; DataError names the first that is not."""
    if not isinstance(rows, Iterable):
        raise DataError(f"data {source!r} is a {type(rows).__name__}, not an iterable of rows")
    taken: list[Row] = []
    for number, row in enumerate(itertools.islice(rows, MOST + 1 if limit is None else limit)):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} of {source!r} is a {type(row).__name__}, not a mapping of fields")
        taken.append(row)
    if len(taken) > MOST:
        raise ConfigError(f"data {source!r} has more than {MOST} rows: set a limit, e.g. data.train_limit = 100000")
    if not taken:
        raise DataError(f"data {source!r} has no rows")
    return taken


def _jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number} is not JSON: {error}") from error
