"""The pool's memory on disk: what became of every position of the data order, and the groups themselves. Synchronous.

    waiting ──> running ──> pooled ──> taken ──> trained          filtered and given_up are ends too, with a reason
       ^___________|__________|__________|                        (a drop, a crash or a resume asks again)

One SQLite file, one connection, every change a durable transaction (WAL, `synchronous=FULL`). A take is undone by a
resume from a checkpoint that does not hold it; labels of weights that such a resume left behind are *abandoned*, and
their tokens are never trained on.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import ConfigError, RunError
from agentrl.rollout.records import (
    Ask,
    Candidate,
    Change,
    Content,
    State,
    Stored,
    TakeRecord,
    TakeRule,
    choose,
    join_labels,
    record_of,
    split_labels,
)
from agentrl.rollout.schema import SCHEMA, figures
from agentrl.types import Version

SETTLED = (State.TAKEN, State.TRAINED, State.FILTERED, State.GIVEN_UP)


class Ledger:
    """The file. Used from one thread at a time; every method is one transaction.

    Groups with tokens of abandoned weights are kept where those weights are at most `keep` updates off the surviving
    line; 0 keeps none.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        self.path = path
        self.keep = keep
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
            self._db.executescript(SCHEMA)
        self._asked: dict[int, int] = {}
        self._low = 0  # every position below it is settled
        with self._transaction():
            self.identity = self._meta("pool", uuid.uuid4().hex)

    def close(self) -> None:
        """Close the file."""
        with self._explained():
            self._db.close()

    # --- asking and putting

    def ask(self, asked: Ask) -> None:
        """The position runs. Written with the next change: a crash before it leaves a gap, which is asked again."""
        self._asked[asked.position] = asked.attempt

    def put(self, groups: Sequence[Stored]) -> list[bool]:
        """Store finished groups; False, and nothing stored, for one that holds tokens of abandoned weights."""
        with self._transaction():
            return [self._put(group) for group in groups]

    def _put(self, group: Stored) -> bool:
        if self._refused(group.labels):
            self._set(group.position, State.WAITING, reason="held tokens of abandoned weights")
            return False
        labels = join_labels(group.labels)
        values = (group.position, self._oldest(group.labels), labels, group.tokens, time.time(), group.body, group.chat)
        self._db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        self._set(group.position, State.POOLED)
        return True

    def settle(self, position: int, state: State, reason: str, labels: Collection[Version] = ()) -> bool:
        """A running group ends filtered or given up; False where it was filtered by abandoned weights: asked again."""
        with self._transaction():
            if refused := self._refused(labels):
                state, reason, labels = State.WAITING, "was filtered by abandoned weights", ()
            self._set(position, state, reason=reason, labels=join_labels(labels))
            return not refused

    def reask(self, asked: Ask, reason: str, max_asks: int) -> Ask | None:
        """A running group grew too old: the next attempt at its row, or None where there were too many."""
        with self._transaction():
            return self._again(asked.position, asked.attempt, reason, max_asks)

    # --- taking

    def take(self, step: int, version: Version, rule: TakeRule) -> Change:
        """The batch of `step`, earliest deadline first; none of its tokens is older than the staleness bound."""
        with self._transaction():
            if known := self._db.execute("SELECT * FROM takes WHERE step = ?", (step,)).fetchone():
                record = record_of(known)
                if record.version != version:
                    raise RunError(
                        f"step {step} was taken for weights {record.version} and is asked for with {version}"
                    )
                return Change(take=record)
            left = self._skipped(version)
            dropped, given_up = self._expire(version.number, rule)
            # What just went is asked again: the last batch is not here yet.
            chosen = self._choose(version.number, replace(rule, last=rule.last and not dropped))
            made = self._record_take(step, version, chosen) if chosen else None
            return Change(made, made is not None, left, dropped, given_up)

    def published(self, version: Version, rule: TakeRule) -> Change:
        """Engines have `version`: what was taken before it is trained; with policy `drop`, what grew too old goes."""
        with self._transaction():
            rows = self._db.execute(
                "SELECT p.position FROM positions p JOIN takes t ON t.id = p.take WHERE p.state = ? AND t.number < ?",
                (State.TAKEN, version.number),
            ).fetchall()
            left = tuple(row[0] for row in rows)
            for position in left:
                self._set(position, State.TRAINED)
            dropped, given_up = ((), ()) if rule.wait else self._expire(version.number, rule)
            return Change(left=left, dropped=dropped, given_up=given_up)

    def body(self, take: int, position: int) -> bytes:
        """The encoded group, without its chat; KeyError where it is not in `take`."""
        query = "SELECT g.body FROM groups g JOIN positions p USING (position) WHERE p.take = ? AND position = ?"
        if row := self._row(query, (take, position)):
            return bytes(row[0])
        raise KeyError(f"group {position} is not in take {take}")

    def chat(self, position: int) -> tuple[bytes, bytes]:
        """Body and chat of a stored group; KeyError where there is none."""
        if row := self._row("SELECT body, chat FROM groups WHERE position = ?", (position,)):
            return bytes(row[0]), bytes(row[1])
        raise KeyError(f"group {position} is not stored")

    # --- starting, resuming, forgetting

    @property
    def incarnation(self) -> int:
        """The last incarnation; 0 before the first."""
        row = self._row("SELECT MAX(incarnation) FROM incarnations", ())
        return int(row[0] or 0) if row else 0

    def start(self, fingerprint: str) -> int:
        """The position at which the data set with this fingerprint begins: 0, or the first fresh one after a change.

        Rows of the earlier data set that still wait are given up; its finished groups stay.
        """
        with self._transaction():
            if self._meta("data", fingerprint) == fingerprint:
                return int(self._meta("start", "0"))
            fresh = self._fresh()
            self._db.execute(
                "UPDATE positions SET state = ?, reason = 'the data changed' WHERE state IN (?, ?)",
                (State.GIVEN_UP, State.WAITING, State.RUNNING),
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("data", fingerprint), ("start", str(fresh))]
            )
            return fresh

    def resume(self, version: Version, cursor: Mapping[str, Any] | None, running: Collection[int] = ()) -> None:
        """A new incarnation goes on from a checkpoint with `cursor` (None: from the start), with weights `version`.

        Takes that the checkpoint does not hold are undone, groups with tokens of abandoned weights and rows that were
        in flight are asked again. `running` groups go on in this process.
        """
        with self._transaction():
            if version.incarnation <= self.incarnation:
                raise RunError(f"weights {version}: incarnation {self.incarnation} exists, labels are never reused")
            self._low = 0
            take = int(cursor["take"]) if cursor else 0
            if cursor and cursor["pool"] != self.identity:
                self._adopt(cursor)
            self._untake(take)
            self._db.execute("INSERT INTO incarnations VALUES (?, ?)", version)
            for position, labels in self._db.execute("SELECT position, labels FROM groups").fetchall():
                if self._state(position) is not State.POOLED:
                    continue
                if self._refused(split_labels(labels)):
                    self._db.execute("DELETE FROM groups WHERE position = ?", (position,))
                    self._set(position, State.WAITING, reason="held tokens of abandoned weights")
                elif self.keep:
                    oldest = self._oldest(split_labels(labels))
                    self._db.execute("UPDATE groups SET oldest = ? WHERE position = ?", (oldest, position))
            filtered = "SELECT position, labels FROM positions WHERE state = ?"
            for position, labels in self._db.execute(filtered, (State.FILTERED,)).fetchall():
                if self._refused(split_labels(labels)):
                    self._set(position, State.WAITING, reason="was filtered by abandoned weights")
            in_flight = self._db.execute("SELECT position FROM positions WHERE state = ?", (State.RUNNING,)).fetchall()
            for (position,) in in_flight:
                if position not in running:
                    self._set(position, State.WAITING, reason="was in flight")
            self._fill_gaps(running)

    def content(self) -> Content:
        """What is live now."""
        with self._transaction():
            found = self._db.execute(
                "SELECT position, attempt, state FROM positions WHERE state IN (?, ?, ?) ORDER BY position",
                (State.WAITING, State.POOLED, State.TAKEN),
            ).fetchall()
            return Content(
                waiting=tuple(Ask(p, a) for p, a, s in found if s == State.WAITING),
                pooled=tuple(p for p, _, s in found if s == State.POOLED),
                taken=tuple(p for p, _, s in found if s == State.TAKEN),
                fresh=self._fresh(),
            )

    def retain(self, take: int) -> int:
        """Forget the tokens of groups taken up to `take`, the oldest retained checkpoint's; how many were forgotten."""
        with self._transaction():
            gone = self._db.execute(
                "DELETE FROM groups WHERE position IN (SELECT position FROM positions WHERE take <= ?)", (take,)
            ).rowcount
            kept = str(max(take, int(self._meta("retained", "0"))))
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('retained', ?)", (kept,))
            return gone

    def metrics(self) -> dict[str, float]:
        """Counts by state, tokens and bytes stored."""
        with self._explained():
            return figures(self._db)

    # --- inside a transaction

    def _set(self, position: int, state: State, *, reason: str = "", labels: str = "") -> None:
        self._db.execute(
            "INSERT INTO positions (position, state, reason, labels) VALUES (?, ?, ?, ?) ON CONFLICT (position) DO "
            "UPDATE SET state = excluded.state, reason = excluded.reason, labels = excluded.labels",
            (position, state, reason, labels),
        )

    def _state(self, position: int) -> State:
        return State(self._db.execute("SELECT state FROM positions WHERE position = ?", (position,)).fetchone()[0])

    def _again(self, position: int, attempt: int, reason: str, max_asks: int) -> Ask | None:
        if attempt + 1 >= max_asks:
            self._set(position, State.GIVEN_UP, reason=f"{reason}, {attempt + 1} times")
            return None
        self._set(position, State.WAITING, reason=reason)
        self._db.execute("UPDATE positions SET attempt = ? WHERE position = ?", (attempt + 1, position))
        return Ask(position, attempt + 1)

    def _skipped(self, version: Version) -> tuple[int, ...]:
        """A step that left the weights as they were (a non-finite loss) publishes nothing: its groups leave here."""
        found = self._db.execute(
            "SELECT p.position, t.step FROM positions p JOIN takes t ON t.id = p.take "
            "WHERE p.state = ? AND t.number >= ?",
            (State.TAKEN, version.number),
        ).fetchall()
        for position, step in found:
            self._set(position, State.GIVEN_UP, reason=f"step {step} made no update")
        return tuple(position for position, _ in found)

    def _expire(self, number: int, rule: TakeRule) -> tuple[tuple[Ask, ...], tuple[int, ...]]:
        found = self._db.execute(
            "SELECT position, attempt FROM groups JOIN positions USING (position) WHERE state = ? AND oldest < ?",
            (State.POOLED, number - rule.staleness),
        ).fetchall()
        dropped, given_up = [], []
        for position, attempt in found:
            self._db.execute("DELETE FROM groups WHERE position = ?", (position,))
            again = self._again(position, attempt, f"older than {rule.staleness} versions", rule.max_asks)
            if again is None:
                given_up.append(position)
            else:
                dropped.append(again)
        return tuple(dropped), tuple(given_up)

    def _choose(self, number: int, rule: TakeRule) -> list[int]:
        found = self._db.execute(
            "SELECT position, oldest FROM groups JOIN positions USING (position) WHERE state = ?", (State.POOLED,)
        )
        return choose([Candidate(*row) for row in found], number, rule)

    def _record_take(self, step: int, version: Version, chosen: Sequence[int]) -> TakeRecord:
        (last,) = self._db.execute("SELECT MAX(id) FROM takes").fetchone()
        take = (last if last is not None else int(self._meta("taken", "0"))) + 1
        for position in chosen:
            self._set(position, State.TAKEN)
            self._db.execute("UPDATE positions SET take = ? WHERE position = ?", (take, position))
        record = TakeRecord(take, step, version, tuple(chosen), self._cursor(take))
        self._db.execute(
            "INSERT INTO takes VALUES (?, ?, ?, ?, ?, ?)",
            (take, step, *version, orjson.dumps(record.positions).decode(), orjson.dumps(record.cursor).decode()),
        )
        return record

    def _cursor(self, take: int) -> dict[str, Any]:
        """What a checkpoint needs to go on without this file: every position below `low` and in `settled` is done."""
        self._low = max(self._low, int(self._meta("base", "0")))
        found = self._db.execute(
            "SELECT position FROM positions WHERE position >= ? AND state IN (?, ?, ?, ?)", (self._low, *SETTLED)
        ).fetchall()
        settled = {position for (position,) in found}
        while self._low in settled:
            settled.remove(self._low)
            self._low += 1
        cursor = {"pool": self.identity, "take": take, "low": self._low, "settled": sorted(settled)}
        return {**cursor, "data": self._meta("data", ""), "start": int(self._meta("start", "0"))}

    def _adopt(self, cursor: Mapping[str, Any]) -> None:
        """The checkpoint's pool is lost and this one is new: settle what the checkpoint says is settled."""
        if self._fresh() > 0:
            raise ConfigError(
                f"{self.path} is not the pool that the checkpoint was made with: resume with the run's own folder, or "
                "move this file away to go on from the checkpoint alone"
            )
        reason = "settled before the checkpoint, whose pool is lost"
        for position in cursor["settled"]:
            self._set(position, State.TRAINED, reason=reason)
        values = {"base": cursor["low"], "taken": cursor["take"], "retained": cursor["take"]}
        values |= {"data": cursor["data"], "start": cursor["start"]}
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(k, str(v)) for k, v in values.items()])

    def _untake(self, take: int) -> None:
        if take < int(self._meta("retained", "0")):
            raise RunError(
                f"cannot go back to take {take}: groups taken up to {self._meta('retained', '0')} were forgotten with "
                "the checkpoints that needed them; resume from a later checkpoint"
            )
        self._db.execute("UPDATE positions SET state = ?, take = NULL WHERE take > ?", (State.POOLED, take))
        self._db.execute("DELETE FROM takes WHERE id > ?", (take,))
        self._db.execute("UPDATE positions SET state = ? WHERE state = ?", (State.TRAINED, State.TAKEN))

    def _fill_gaps(self, running: Collection[int]) -> None:
        known = {p for (p,) in self._db.execute("SELECT position FROM positions")} | set(running)
        for position in range(int(self._meta("base", "0")), self._fresh()):
            if position not in known:
                self._set(position, State.WAITING, reason="was in flight")

    def _fresh(self) -> int:
        (last,) = self._db.execute("SELECT MAX(position) FROM positions").fetchone()
        return max(int(self._meta("base", "0")), 0 if last is None else last + 1)

    def _lost(self, label: Version) -> int:
        """How many updates `label` is off the surviving line: those after the place where a later incarnation began."""
        later = "SELECT MIN(number) FROM incarnations WHERE incarnation > ?"
        (low,) = self._db.execute(later, (label.incarnation,)).fetchone()
        return max(0, label.number - int(low)) if low is not None else 0

    def _refused(self, labels: Iterable[Version]) -> bool:
        return any(self._lost(label) > self.keep for label in labels)

    def _oldest(self, labels: Iterable[Version]) -> int | None:
        """The oldest label as a version of the surviving line: from it, back to the fork is as far as to the label."""
        return min((label.number - 2 * self._lost(label) for label in labels), default=None)

    def _meta(self, key: str, default: str) -> str:
        self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, default))
        return str(self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

    def _row(self, query: str, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        with self._explained():
            row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
        return row

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(
                    "INSERT INTO positions (position, attempt, state) VALUES (?, ?, 'running') ON CONFLICT (position) "
                    "DO UPDATE SET state = 'running', attempt = excluded.attempt",
                    list(self._asked.items()),
                )
                yield
                self._db.execute("COMMIT")
                self._asked = {}
            except BaseException:
                self._low = 0
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise RunError(
                f"the pool {self.path} cannot be read or written: {error}; nothing was half-stored. Check free space "
                "and rights of its folder, then resume"
            ) from error
