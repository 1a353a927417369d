"""The pool's tables, and what they hold in figures."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from agentrl.rollout.records import State

SCHEMA = """
PRAGMA page_size=8192;
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS incarnations (incarnation INTEGER PRIMARY KEY, number INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS takes (
  id INTEGER PRIMARY KEY, step INTEGER NOT NULL UNIQUE, incarnation INTEGER NOT NULL, number INTEGER NOT NULL,
  positions TEXT NOT NULL, cursor TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS positions (
  position INTEGER PRIMARY KEY, attempt INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL, take INTEGER,
  labels TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS positions_state ON positions (state);
CREATE TABLE IF NOT EXISTS groups (
  position INTEGER PRIMARY KEY, oldest INTEGER, labels TEXT NOT NULL, tokens INTEGER NOT NULL, stored REAL NOT NULL,
  body BLOB NOT NULL, chat BLOB NOT NULL);
"""


def figures(db: sqlite3.Connection) -> dict[str, float]:
    """Counts by state, tokens and bytes stored, and the age of the oldest pooled group in seconds."""
    counts = dict(db.execute("SELECT state, COUNT(*) FROM positions GROUP BY state").fetchall())
    stored = "SELECT COUNT(*), COALESCE(SUM(tokens), 0), COALESCE(SUM(LENGTH(body) + LENGTH(chat)), 0) FROM groups"
    n, tokens, size = db.execute(stored).fetchone()
    (oldest,) = db.execute(
        "SELECT MIN(stored) FROM groups JOIN positions USING (position) WHERE state = ?", (State.POOLED,)
    ).fetchone()
    return {
        **{f"positions_{state.value}": float(counts.get(state.value, 0)) for state in State},
        "stored_groups": float(n),
        "stored_tokens": float(tokens),
        "stored_bytes": float(size),
        "oldest_pooled_s": 0.0 if oldest is None else max(0.0, time.time() - oldest),
    }


def stored_bodies(path: Path, most: int) -> list[bytes]:
    """The newest groups in a pool's file, as `wire.encode_group` made them; only reads, also while a run goes on."""
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)
    try:
        return [row[0] for row in db.execute("SELECT body FROM groups ORDER BY position DESC LIMIT ?", (most,))]
    finally:
        db.close()
