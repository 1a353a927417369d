"""A folder of saved evaluations: `NAME.json`, what was asked, and `NAME.jsonl`, an episode a line.

An episode is known by the hash of its row, by how often that row stood before in the data, and by its sample number: so
an evaluation that was cut short goes on, and one with more rows or more samples plays only what is new.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from agentrl.errors import ConfigError, DataError
from agentrl.types import Episode, Row, Stop

AGAIN = frozenset({Stop.ENGINE_LOST.value, Stop.SANDBOX_LOST.value, Stop.CANCELLED.value})
"""Episodes that ended so say nothing of the model: a resumed evaluation plays them again."""


class Key(NamedTuple):
    """Which episode it is."""

    row: str
    copy: int
    sample: int


def row_keys(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Hash and number of each row: equal rows are told apart by their order."""
    seen: Counter[str] = Counter()
    keys = []
    for row in rows:
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
        keys.append((digest, seen[digest]))
        seen[digest] += 1
    return keys


class Saved:
    """One data set's file. `settings` are what all its episodes were played with."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Start it, or with `resume` go on; ConfigError where it is there and may not be, or was played otherwise."""
        self.path = folder / f"{name}.jsonl"
        asked = folder / f"{name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.lines: dict[Key, dict[str, Any]] = {}
        if asked.exists():
            if not resume:
                raise ConfigError(f"{self.path} is there already: give --resume to go on with it, or another folder")
            before = json.loads(asked.read_text(encoding="utf-8"))
            if other := {k: (before.get(k), v) for k, v in settings.items() if before.get(k) != v}:
                told = "; ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in other.items())
                raise ConfigError(f"{self.path} cannot go on: {told}; use another folder")
            self.lines = read_saved(self.path)
        asked.write_text(json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # Line-buffered: a kill tears at most the last line.
        self._file: IO[str] = self.path.open("a", buffering=1, encoding="utf-8")
        if self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            self._file.write("\n")

    def done(self, key: Key) -> dict[str, Any] | None:
        """The episode's line, where it need not be played again."""
        line = self.lines.get(key)
        return None if line is None or line["stop"] in AGAIN else line

    def write(self, key: Key, episode: Episode) -> dict[str, Any]:
        """Keep an episode."""
        line = to_line(key, episode)
        self.lines[key] = line
        self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def to_line(key: Key, episode: Episode) -> dict[str, Any]:
    """An episode as JSON."""
    return {
        "key": list(key),
        "row": dict(episode.row),
        "seed": episode.seed,
        "stop": episode.stop.value,
        "reward": episode.reward,
        "turns": [{"agent": t.agent, "reward": t.reward, "parts": dict(t.parts)} for t in episode.turns],
        "messages": list(episode.messages),
        "metrics": dict(episode.metrics),
        "error": episode.error,
    }


def read_saved(path: Path) -> dict[Key, dict[str, Any]]:
    """The newest line of each episode; torn lines are left out."""
    found: dict[Key, dict[str, Any]] = {}
    if not path.exists():
        return found
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
            found[Key(*line["key"])] = line
        except (ValueError, KeyError, TypeError):
            continue
    return found


def write_sets(folder: Path, name: str, settings: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
    """A whole data set at once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def by_row(episodes: Mapping[Key, dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The episodes of each row together."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for key in sorted(episodes):
        rows.setdefault((key.row, key.copy), []).append(episodes[key])
    return list(rows.values())


def saved_sets(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[Key, dict[str, Any]]]]:
    """Name, settings and episodes of each data set in a folder; DataError where it holds none."""
    names = sorted(path.stem for path in folder.glob("*.json") if path.with_suffix(".jsonl").is_file())
    if not names:
        raise DataError(f"{folder} holds no saved evaluation: there is no NAME.json beside a NAME.jsonl in it")
    for name in names:
        settings = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        yield name, settings, read_saved(folder / f"{name}.jsonl")
