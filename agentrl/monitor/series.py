"""metrics.jsonl as columns, read on as it grows: what the page's curves and time line are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_POINTS = 4000
"""Above that every second, third … step is sent; nobody's screen has more columns."""
EVENT_KINDS = frozenset({"begin", "eval", "publish", "checkpoint", "fault"})
MAX_EVENTS = 20_000


class Cursor(NamedTuple):
    """How far a reader has come. Another generation or stride: it is to start again."""

    generation: int = 0
    stride: int = 1
    rows: int = 0
    events: int = 0


class Series:
    """The steps that survive, in order: a resume from step s takes back the steps after s."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.steps: list[int] = []
        self.times: list[float] = []
        self.columns: dict[str, list[float | None]] = {}
        self.events: list[dict[str, Any]] = []
        self._offset = 0
        self._torn = b""

    def refresh(self) -> None:
        """Read what was appended since the last call."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # replaced by a shorter file
                    self._back_to(-1)
                    self.events, self._offset, self._torn = [], 0, b""
                file.seek(self._offset)
                data = self._torn + file.read()
                self._offset = file.tell()
        except FileNotFoundError:
            return
        *lines, self._torn = data.split(b"\n")
        for line in lines:
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError):
                continue
            if isinstance(value, dict):
                self._add(value)

    def since(self, cursor: Cursor, keys: Sequence[str]) -> dict[str, Any]:
        """The rows and events after `cursor`, of `keys` (all where empty), and the cursor to go on from."""
        stride = -(-len(self.steps) // MAX_POINTS) or 1
        if (cursor.generation, cursor.stride) != (self.generation, stride) or cursor.rows > len(self.steps):
            cursor = Cursor()
        rows = [i for i in range(cursor.rows, len(self.steps)) if i % stride == 0]
        wanted = [key for key in keys or self.columns if key in self.columns]
        return {
            "from": cursor.rows,
            "cursor": list(Cursor(self.generation, stride, len(self.steps), len(self.events))),
            "step": [self.steps[i] for i in rows],
            "time": [self.times[i] for i in rows],
            "columns": {key: [_at(self.columns[key], i) for i in rows] for key in wanted},
            "keys": sorted(self.columns),
            "events": self.events[cursor.events :],
        }

    def last(self) -> dict[str, float]:
        """The figures of the last step."""
        index = len(self.steps) - 1
        if index < 0:
            return {}
        found = {key: _at(column, index) for key, column in self.columns.items()}
        return {"step": self.steps[index], **{key: value for key, value in found.items() if value is not None}}

    def _add(self, line: Mapping[str, Any]) -> None:
        kind, step, time = line.get("kind"), line.get("step"), line.get("time")
        if not isinstance(time, int | float):
            return
        if kind == "step" and isinstance(step, int):
            if self.steps and step <= self.steps[-1]:
                self._back_to(step - 1)
            self.steps.append(step)
            self.times.append(float(time))
            for key, value in _flat(line):
                column = self.columns.setdefault(key, [])
                column.extend([None] * (len(self.steps) - 1 - len(column)))
                column.append(value)
        elif kind in EVENT_KINDS:
            if kind == "begin" and isinstance(step, int) and self.steps and step < self.steps[-1]:
                self._back_to(step)
            self.events.append(dict(line))
            if len(self.events) > MAX_EVENTS:
                del self.events[: MAX_EVENTS // 2]
                self.generation += 1

    def _back_to(self, step: int) -> None:
        kept = sum(known <= step for known in self.steps)
        del self.steps[kept:], self.times[kept:]
        for column in self.columns.values():
            del column[kept:]
        self.generation += 1


def _at(column: Sequence[float | None], index: int) -> float | None:
    return column[index] if index < len(column) else None


def _flat(line: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """Numbers under their own names; those of an environment as `envs/NAME/figure`."""
    found: list[tuple[str, float | None]] = []
    for key, value in line.items():
        if key in ("kind", "time", "step"):
            continue
        if isinstance(value, int | float):
            found.append((key, float(value)))
        elif key == "envs" and isinstance(value, dict):
            for env, figures in value.items():
                if isinstance(figures, dict):
                    found += [
                        (f"envs/{env}/{name}", None if number is None else float(number))
                        for name, number in figures.items()
                        if number is None or isinstance(number, int | float)
                    ]
    return found
