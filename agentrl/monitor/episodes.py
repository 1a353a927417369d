"""Looking into episodes.sqlite: the reader beside `archive.Archive`, which may be writing at the same time."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.errors import AgentRLError
from agentrl.monitor.facts import EPISODE_COLUMNS
from agentrl.train.trace import Place, TokenTrace, decode_trace
from agentrl.types import Demonstration, Episode, Group, Sampled, Trajectory
from agentrl.wire import decode_group

MAX_PAGE = 500
MAX_FAILURES = 20
_NUMBERS = re.compile(r"\d+(\.\d+)*")
COLUMNS = ("id", *(column.split()[0] for column in EPISODE_COLUMNS))
_LISTED = tuple(name for name in COLUMNS if name != "versions")
ORDERS = ("id", "reward", "turns", "tokens", "sampled", "oldest", "newest", "step", "trained", "position")
_EQUAL = {
    "env": "env",
    "stop": "stop",
    "fate": "fate",
    "kind": "kind",
    "step": "step",
    "trained": "trained",
    "position": "position",
    "group": "group_id",
}
_LIMITS = {
    "reward_min": "reward >= ?",
    "reward_max": "reward <= ?",
    "tokens_min": "tokens >= ?",
    "tokens_max": "tokens <= ?",
    "turns_min": "turns >= ?",
    "turns_max": "turns <= ?",
}


class BadQuery(AgentRLError):
    """A filter that cannot be understood."""


class NotKept(AgentRLError):
    """An episode that the index knows and whose body went for want of room, or that never was."""


class Tokens(NamedTuple):
    """A stretch of a trajectory, one value a token; None where there is none to say."""

    start: int
    length: int
    ids: list[int]
    kinds: list[str]
    """"context", "sampled", "untrained" (sampled, and left out of the loss) or "demonstration"."""
    versions: list[str | None]
    temperatures: list[float | None]
    logprobs: list[float | None]
    advantages: list[float | None]
    ratios: list[float | None]


class Episodes:
    """One run's episodes. Safe to use from several threads; None of its methods writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._decoded: tuple[int, Group] | None = None

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The episodes that fit the filters of `query`, newest first or by `order`, `limit` of them from `offset`."""
        where, values = _where(query)
        order, limit, offset = query.get("order", "-id"), _whole(query, "limit", 100), _whole(query, "offset", 0)
        if order.removeprefix("-") not in ORDERS:
            raise BadQuery(f"order = {order!r}: expected one of {', '.join(ORDERS)}, with '-' for descending")
        direction = "DESC" if order.startswith("-") else "ASC"
        by = f"{order.removeprefix('-')} {direction} NULLS LAST, id {direction}"
        names = ", ".join(_LISTED)
        rows = self._rows(
            f"SELECT {names} FROM episodes{where} ORDER BY {by} LIMIT ? OFFSET ?",
            (*values, min(limit, MAX_PAGE), offset),
        )
        ((total,),) = self._rows(f"SELECT COUNT(*) FROM episodes{where}", values) or [(0,)]
        return {"total": total, "offset": offset, "columns": _LISTED, "rows": rows}

    def facets(self) -> dict[str, Any]:
        """What can be filtered by, with counts."""
        found: dict[str, Any] = {}
        for name in ("env", "stop", "fate", "kind"):
            found[name] = dict(self._rows(f"SELECT {name}, COUNT(*) FROM episodes GROUP BY {name} ORDER BY {name}", ()))
        bounds = self._rows("SELECT MIN(oldest), MAX(newest), MIN(reward), MAX(reward), COUNT(*) FROM episodes", ())
        oldest, newest, low, high, count = bounds[0] if bounds else (None, None, None, None, 0)
        return {**found, "versions": [oldest, newest], "rewards": [low, high], "count": count}

    def failures(self) -> list[dict[str, Any]]:
        """What went wrong, most frequent first: errors that differ in numbers alone count as one; with an example."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        query = "SELECT stop, error, COUNT(*), MAX(id) FROM episodes WHERE error IS NOT NULL GROUP BY stop, error"
        for stop, error, count, key in self._rows(query, ()):
            kind = (stop, _NUMBERS.sub("#", error))
            known = found.setdefault(kind, {"stop": stop, "error": error, "count": 0, "id": key})
            known["count"] += count
        return sorted(found.values(), key=lambda failure: -failure["count"])[:MAX_FAILURES]

    def versions(self, query: Mapping[str, str]) -> dict[str, int]:
        """How many sampled tokens each version has, over the episodes that fit."""
        where, values = _where(query)
        total: Counter[str] = Counter()
        for (text,) in self._rows(f"SELECT versions FROM episodes{where}", values):
            total.update(orjson.loads(text))
        return dict(sorted(total.items(), key=lambda item: tuple(int(part) for part in item[0].split("."))))

    def facts(self, key: int) -> dict[str, Any]:
        """The index's row of an episode; NotKept where there is none."""
        found = self._rows(f"SELECT {', '.join(COLUMNS)} FROM episodes WHERE id = ?", (key,))
        if not found:
            raise NotKept(f"there is no episode {key} in {self.path}")
        return dict(zip(COLUMNS, found[0], strict=True))

    def episode(self, key: int) -> dict[str, Any]:
        """Everything about one episode but its tokens."""
        facts = self.facts(key)
        episode = self._body(facts["group_id"]).episodes[facts["place"]]
        near = "SELECT id, sample, reward, stop FROM episodes WHERE group_id = ? ORDER BY sample"
        return {**facts, **_told(episode), "group": self._rows(near, (facts["group_id"],))}

    def group(self, group_id: int) -> list[dict[str, Any]]:
        """The episodes of a group, for looking at side by side."""
        found = self._rows("SELECT id FROM episodes WHERE group_id = ? ORDER BY sample", (group_id,))
        return [self.episode(key) for (key,) in found]

    def tokens(self, key: int, trajectory: int, start: int, count: int) -> Tokens:
        """`count` tokens of a trajectory from `start`, with all that is known of each."""
        facts = self.facts(key)
        episode = self._body(facts["group_id"]).episodes[facts["place"]]
        if not 0 <= trajectory < len(episode.trajectories):
            raise NotKept(f"episode {key} has {len(episode.trajectories)} trajectories, there is no {trajectory}")
        place = Place(facts["position"], facts["place"], trajectory)
        trace = None if facts["trained"] is None else self._trace(facts["trained"], place)
        return _stretch(episode.trajectories[trajectory], trace, start, count)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _trace(self, step: int, place: Place) -> TokenTrace | None:
        for (body,) in self._rows("SELECT body FROM traces WHERE step = ? ORDER BY rank", (step,)):
            if (found := decode_trace(body, place)) is not None:
                return found
        return None

    def _body(self, group_id: int) -> Group:
        known = self._decoded
        if known is not None and known[0] == group_id:
            return known[1]
        found = self._rows("SELECT body FROM bodies WHERE id = ?", (group_id,))
        if not found:
            raise NotKept(
                "this episode's messages and tokens are no longer kept: monitor.keep_mb was reached, and the oldest "
                "go first"
            )
        group = decode_group(found[0][0])
        self._decoded = (group_id, group)
        return group

    def _rows(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with self._lock:
            if self._db is None:
                if not self.path.exists():
                    return []
                self._db = _open(self.path)
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):  # the writer has only just made the file
                    return []
                raise AgentRLError(f"{self.path} cannot be read: {error}") from error
            except sqlite3.DatabaseError as error:
                raise AgentRLError(f"{self.path} is damaged: {error}") from error


def _open(path: Path) -> sqlite3.Connection:
    address = path.absolute().as_uri()
    try:
        db = sqlite3.connect(f"{address}?mode=ro", uri=True, check_same_thread=False, timeout=5.0)
        db.execute("SELECT COUNT(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        # A copy in a folder that may not be written: there is no writer, so nothing changes under us.
        db = sqlite3.connect(f"{address}?immutable=1", uri=True, check_same_thread=False)
    return db


def _where(query: Mapping[str, str]) -> tuple[str, tuple[object, ...]]:
    parts, values = [], []
    for name, column in _EQUAL.items():
        if text := query.get(name, ""):
            parts.append(f"{column} = ?")
            values.append(text if name in ("env", "stop", "fate", "kind") else _number(name, text))
    for name, condition in _LIMITS.items():
        if text := query.get(name, ""):
            parts.append(condition)
            values.append(_number(name, text))
    if text := query.get("version", ""):
        parts.append("oldest <= ? AND newest >= ?")
        values += [_number("version", text)] * 2
    if text := query.get("text", ""):
        parts.append("(instr(row, ?) > 0 OR instr(COALESCE(error, ''), ?) > 0)")
        values += [text, text]
    if query.get("split", ""):
        parts.append("splits != ''")
    if query.get("failed", ""):
        parts.append("reward IS NULL")
    return (" WHERE " + " AND ".join(parts) if parts else ""), tuple(values)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise BadQuery(f"{name} = {text!r} is no number") from error


def _whole(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if text and not (text.isdecimal() and len(text) < 15):
        raise BadQuery(f"{name} = {text!r}: expected a whole number >= 0")
    return int(text) if text else default


def _told(episode: Episode) -> dict[str, Any]:
    return {
        "row": dict(episode.row),
        "messages": list(episode.messages),
        "turns": [
            {"index": t.index, "trajectory": t.trajectory, "end": t.end, "reward": t.reward, "agent": t.agent}
            | {"parts": dict(t.parts)}
            for t in episode.turns
        ],
        "trajectories": [
            {"reason": t.reason.value, "agent": t.agent, "abandoned": t.abandoned, "length": len(t)}
            | {"sampled": int(t.loss_mask.sum()), "segments": len(t.segments)}
            for t in episode.trajectories
        ],
        "metrics": dict(episode.metrics),
        "seed": episode.seed,
        "attempt": episode.attempt,
        "error": episode.error,
    }


def _stretch(trajectory: Trajectory, trace: TokenTrace | None, start: int, count: int) -> Tokens:
    cut = slice(start, start + count)
    sources = [s.source for s in trajectory.segments for _ in range(len(s))][cut]
    sampled = [isinstance(source, Sampled) for source in sources]
    logprobs = trajectory.logprobs[cut]
    advantages: list[float | None] = [None] * len(sources)
    ratios: list[float | None] = [None] * len(sources)
    if trace is not None and len(trace.advantages) == len(trajectory):
        advantages = _numbers(trace.advantages[cut])
        ratios = _numbers(np.exp(np.minimum(trace.logprobs[cut] - logprobs, 50.0)))
    return Tokens(
        start,
        len(trajectory),
        trajectory.tokens[cut].tolist(),
        [_kind(source) for source in sources],
        [str(source.version) if isinstance(source, Sampled) else None for source in sources],
        [source.temperature if isinstance(source, Sampled) else None for source in sources],
        [x if known else None for x, known in zip(_numbers(logprobs), sampled, strict=True)],
        advantages,
        ratios,
    )


def _kind(source: object) -> str:
    if isinstance(source, Sampled):
        return "sampled" if source.trained else "untrained"
    return "demonstration" if isinstance(source, Demonstration) else "context"


def _numbers(values: NDArray[np.float32]) -> list[float | None]:
    return [round(float(x), 5) if np.isfinite(x) else None for x in values]
