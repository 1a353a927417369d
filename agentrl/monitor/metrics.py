"""metrics.jsonl: one JSON object a line, appended as things happen; everything else that shows a run reads it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends events. Every line has `kind` ("step", "eval", "publish", …) and `time` (Unix seconds)."""

    def __init__(self, path: Path, on_line: Callable[[Mapping[str, Any]], None] = lambda _: None) -> None:
        """`on_line` is told of every line that was written."""
        self.path = path
        self._on_line = on_line
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered: after a kill -9 at most the last line is torn, and `read_metrics` skips that.
        self._file = path.open("a", buffering=1, encoding="utf-8")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")

    def write(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line; NaN and infinities become null, which JSON has. Returns what was written."""
        line = {"kind": kind, "time": round(time.time(), 3), **{key: _plain(value) for key, value in values.items()}}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._on_line(line)
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file, torn ones left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(value, dict) and "kind" in value:
                yield value


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return (
            round(value, 6) if math.isfinite(value) and abs(value) > 1e-3 else value if math.isfinite(value) else None
        )
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
