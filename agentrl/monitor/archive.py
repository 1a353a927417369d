"""episodes.sqlite: every finished episode and what training made of its tokens, kept for people to look at.

Nothing of a run depends on it. A thread of its own writes; the run hands over references and goes on. Where the thread
cannot keep up, groups are left out and counted; where the disk refuses, recording ends and the run goes on.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import orjson

from agentrl.monitor.facts import EPISODE_COLUMNS, EpisodePlace, episode_facts
from agentrl.types import Group
from agentrl.wire import encode_group

SCHEMA = f"""
PRAGMA journal_mode=WAL;
PRAGMA synchronous=NORMAL;
CREATE TABLE IF NOT EXISTS groups (
  id INTEGER PRIMARY KEY, position INTEGER NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, fate TEXT NOT NULL,
  env TEXT NOT NULL, step INTEGER NOT NULL, trained INTEGER, time REAL NOT NULL, size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS groups_position ON groups (position);
CREATE TABLE IF NOT EXISTS bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS episodes (id INTEGER PRIMARY KEY, {", ".join(EPISODE_COLUMNS)});
CREATE INDEX IF NOT EXISTS episodes_group ON episodes (group_id);
CREATE INDEX IF NOT EXISTS episodes_step ON episodes (step);
CREATE INDEX IF NOT EXISTS episodes_trained ON episodes (trained);
CREATE INDEX IF NOT EXISTS episodes_reward ON episodes (reward);
CREATE TABLE IF NOT EXISTS traces (
  step INTEGER NOT NULL, rank INTEGER NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (step, rank));
"""
WAITING = 512
"""Changes that may wait for the thread before further ones are left out."""
COMMIT_SECONDS = 0.5


class Archive:
    """The writer. `limit` is how many bytes of episodes and traces are kept; the oldest go first, their index stays.

    Every method returns at once and raises nothing. `on_error` is told once, in words, when recording ends early.
    """

    def __init__(self, path: Path, *, limit: int, on_error: Callable[[str], None] = lambda _: None) -> None:
        self.path = path
        self.left_out = 0
        self._limit = limit
        self._on_error = on_error
        self._queue: queue.Queue[Callable[[sqlite3.Connection], None] | None] = queue.Queue(WAITING)
        self._size = 0
        self._broken = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def group(self, group: Group, fate: str, *, step: int, kind: str = "train") -> None:
        """A group ended as `fate`. `step` is the one that was being worked on, or that an evaluation belongs to."""
        when = time.time()
        self._put(lambda db: self._add(db, group, fate, step, kind, when))

    def taken(self, step: int, positions: Sequence[int]) -> None:
        """These groups are what `step` trains on."""
        self._put(lambda db: _trained(db, step, positions))

    def resumed(self, step: int) -> None:
        """The run goes on from a checkpoint of `step`: what later steps made of tokens is void."""

        def undo(db: sqlite3.Connection) -> None:
            for table in ("groups", "episodes"):
                db.execute(f"UPDATE {table} SET trained = NULL WHERE trained > ?", (step,))
            db.execute("DELETE FROM traces WHERE step > ?", (step,))

        self._put(undo)

    def trace(self, step: int, rank: int, body: bytes) -> None:
        """See `agentrl.train.trace`."""

        def add(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO traces VALUES (?, ?, ?, ?)", (step, rank, len(body), body))
            self._grow(db, len(body))

        self._put(add)

    @property
    def waiting(self) -> int:
        """Changes that are not written yet."""
        return self._queue.qsize()

    def close(self, timeout: float = 30.0) -> None:
        """Write what waits, for at most `timeout` seconds, and close the file."""
        self._closing.set()
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _put(self, change: Callable[[sqlite3.Connection], None]) -> None:
        if self._broken:
            return
        try:
            self._queue.put_nowait(change)
        except queue.Full:
            self.left_out += 1

    # --- in the thread

    def _run(self) -> None:
        try:
            db = sqlite3.connect(self.path, isolation_level=None, timeout=10.0)
            try:
                self._write(db)
            finally:
                db.close()
        except Exception as error:  # whatever it is: looking at a run must not end it
            self._broken = True
            self._on_error(f"episodes are no longer kept for the page: {self.path}: {error}")
            while self._queue.get() is not None:  # so that `close` finds an end
                pass

    def _write(self, db: sqlite3.Connection) -> None:
        db.executescript(SCHEMA)
        query = "SELECT (SELECT COALESCE(SUM(size), 0) FROM groups WHERE id IN (SELECT id FROM bodies)) + "
        (self._size,) = db.execute(query + "(SELECT COALESCE(SUM(size), 0) FROM traces)").fetchone()
        while True:
            changes: list[Callable[[sqlite3.Connection], None] | None] = [self._queue.get()]
            if changes[0] is not None:
                self._closing.wait(COMMIT_SECONDS)  # what comes meanwhile shares the transaction
            while not self._queue.empty():
                changes.append(self._queue.get())
            db.execute("BEGIN")
            for change in changes:
                if change is not None:
                    change(db)
            db.execute("COMMIT")
            if None in changes:
                return

    def _add(self, db: sqlite3.Connection, group: Group, fate: str, step: int, kind: str, when: float) -> None:
        try:
            body = encode_group(group)
            facts = [
                episode_facts(e, i, EpisodePlace(group, fate, kind, step, when)) for i, e in enumerate(group.episodes)
            ]
        except (TypeError, ValueError):  # no JSON: a lone surrogate in a row, say
            self.left_out += 1
            return
        values = (group.id, group.attempt, kind, fate, group.env, step, when, len(body))
        names = "position, attempt, kind, fate, env, step, time, size"
        key = db.execute(f"INSERT INTO groups ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values).lastrowid or 0
        db.execute("INSERT INTO bodies VALUES (?, ?)", (key, body))
        insert_episodes(db, ((key, *fact) for fact in facts))
        self._grow(db, len(body))

    def _grow(self, db: sqlite3.Connection, size: int) -> None:
        self._size += size
        while self._size > self._limit:
            oldest = db.execute("SELECT id, LENGTH(body) FROM bodies ORDER BY id LIMIT 1").fetchone()
            trace = db.execute("SELECT step, SUM(size), COUNT(*) FROM traces GROUP BY step ORDER BY step").fetchone()
            (traces,) = db.execute("SELECT COALESCE(SUM(size), 0) FROM traces").fetchone()
            if trace is not None and (oldest is None or traces > self._limit / 2):
                db.execute("DELETE FROM traces WHERE step = ?", (trace[0],))
                self._size -= trace[1]
            elif oldest is not None:
                db.execute("DELETE FROM bodies WHERE id = ?", (oldest[0],))
                self._size -= oldest[1]
            else:
                return


def recent_bodies(path: Path, most: int) -> list[bytes]:
    """The newest groups that training played, as `wire.encode_group` made them; none where nothing was kept."""
    if not path.is_file():
        return []
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)
    try:
        query = "SELECT body FROM bodies JOIN groups USING (id) WHERE kind = 'train' AND fate IN ('pooled', 'filtered')"
        return [row[0] for row in db.execute(f"{query} ORDER BY id DESC LIMIT ?", (most,))]
    finally:
        db.close()


def insert_episodes(db: sqlite3.Connection, rows: Iterable[tuple[object, ...]]) -> None:
    """Rows of the index, in the order of `EPISODE_COLUMNS`."""
    names = ", ".join(column.split()[0] for column in EPISODE_COLUMNS)
    marks = ", ".join("?" for _ in EPISODE_COLUMNS)
    db.executemany(f"INSERT INTO episodes ({names}) VALUES ({marks})", rows)


def _trained(db: sqlite3.Connection, step: int, positions: Sequence[int]) -> None:
    found = db.execute(
        "SELECT MAX(id) FROM groups WHERE kind = 'train' AND fate = 'pooled' AND position IN "
        "(SELECT value FROM json_each(?)) GROUP BY position",
        (orjson.dumps(list(positions)).decode(),),
    ).fetchall()
    db.executemany("UPDATE groups SET trained = ? WHERE id = ?", [(step, key) for (key,) in found])
    db.executemany("UPDATE episodes SET trained = ? WHERE group_id = ?", [(step, key) for (key,) in found])
