"""Checks a run's books: what was trained, how often, on which tokens. Written apart from the code that keeps them.

    python examples/ledger.py runs/my-run

It imports nothing of agentrl. Two sources that know nothing of each other must agree: metrics.jsonl, which tells what
was handed to the trainer, and pool.sqlite, which says what became of every row. Checked of the *surviving history* (a
resume from a checkpoint abandons the steps after it):

* steps and take ids go 1, 2, 3, … without a gap, and both sources name the same groups for each
* no group is in two takes, none is lost, and no position of the data order is missing
* no trained token is more than the run's staleness older than its step, and none is of abandoned weights

The last line is JSON; the exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import struct
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

SCORED = {"finished", "truncated", "max_turns", "max_tokens", "time_limit"}
DONE = {"trained", "taken", "filtered", "given_up"}
DEFAULT_STALENESS = 4
"""`rollout.staleness` where the run's config leaves it out."""
OPEN = {"waiting", "running", "pooled"}


class Label(NamedTuple):
    """`incarnation.number` of weights."""

    incarnation: int
    number: int


class Take(NamedTuple):
    """What metrics.jsonl says of one step of the surviving history."""

    id: int
    step: int
    label: Label
    groups: tuple[int, ...]


class History(NamedTuple):
    """The surviving steps, and where each incarnation began (as the number of its first weights)."""

    takes: list[Take]
    begins: dict[int, int]
    abandoned_steps: int


def label(text: str) -> Label:
    """Read `"2.17"`."""
    incarnation, number = text.split(".")
    return Label(int(incarnation), int(number))


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of metrics.jsonl; a kill may have torn one."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def history(run: Path) -> History:
    """Replay metrics.jsonl: a step counts once its metrics came, a new incarnation drops the steps after its start."""
    handed: dict[tuple[int, int], Take] = {}
    done: dict[int, Take] = {}
    begins: dict[int, int] = {}
    incarnation = abandoned = 0
    for line in lines_of(run / "metrics.jsonl"):
        if line["kind"] == "begin":
            start = label(line["version"])
            incarnation = start.incarnation
            begins[incarnation] = start.number
            abandoned += sum(step > line["step"] for step in done)
            done = {step: take for step, take in done.items() if step <= line["step"]}
        elif line["kind"] == "take":
            take = Take(line["take"], line["step"], label(line["version"]), tuple(line["groups"]))
            handed[take.label.incarnation, take.step] = take
        elif line["kind"] == "step":
            done[line["step"]] = handed[label(line["version"]).incarnation, line["step"]]
    return History([done[step] for step in sorted(done)], begins, abandoned)


def trained_labels(body: bytes) -> Iterator[tuple[Label, int]]:
    """Label and length of every trained segment of a stored group: a JSON header, then arrays, in zstd."""
    raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=1 << 31)
    (size,) = struct.unpack_from("<I", raw)
    for episode in json.loads(raw[4 : 4 + size])["episodes"]:
        if episode["stop"] not in SCORED or any(turn[3] is None for turn in episode["turns"]):
            continue
        for trajectory in episode["trajectories"]:
            for segment in [] if trajectory["abandoned"] else trajectory["segments"]:
                if segment[1] == "s" and segment[4]:
                    yield label(segment[2]), segment[0]


def updates_between(label: Label, at: Label, begins: dict[int, int]) -> tuple[int, int]:
    """Updates from the last common weights to `label` (0: it is an ancestor), and from there to `at`."""
    between = (number for n, number in begins.items() if label.incarnation < n <= at.incarnation)
    fork = min((label.number, *between))
    return label.number - fork, at.number - fork


def check(run: Path) -> dict[str, Any]:
    """The verdict on a run that has ended."""
    told = history(run)
    config = tomllib.loads((run / "config.toml").read_text()).get("rollout", {})
    staleness, keep = config.get("staleness", DEFAULT_STALENESS), config.get("keep_abandoned", False)
    db = sqlite3.connect(f"file:{run / 'pool.sqlite'}?mode=ro", uri=True)
    states = dict(db.execute("SELECT position, state FROM positions"))
    unexplained = db.execute(
        "SELECT COUNT(*) FROM positions WHERE state IN ('filtered', 'given_up') AND reason = ''"
    ).fetchone()[0]
    stored = {
        step: (take, tuple(json.loads(positions)), Label(incarnation, number))
        for take, step, incarnation, number, positions in db.execute(
            "SELECT id, step, incarnation, number, positions FROM takes"
        )
    }
    ids, steps = [take.id for take in told.takes], [take.step for take in told.takes]
    of_takes = Counter(group for take in told.takes for group in take.groups)
    differing = [t.step for t in told.takes if stored.get(t.step) != (t.id, t.groups, t.label)]
    tokens: Counter[str] = Counter()
    oldest = 0
    for take in told.takes:
        for group in take.groups:
            row = db.execute("SELECT body FROM groups WHERE position = ?", (group,)).fetchone()
            if row is None:
                tokens["forgotten_groups"] += 1
                continue
            for made_by, length in trained_labels(row[0]):
                tokens["trained"] += length
                aside, ahead = updates_between(made_by, take.label, told.begins)
                oldest = max(oldest, aside + ahead)
                tokens["over_staleness"] += length * (aside + ahead > staleness)
                tokens["abandoned"] += length * (aside > 0)
    db.close()
    wrong = {
        "lost": sum(states.get(group) not in DONE for group in of_takes),
        "trained_twice": sum(count > 1 for count in of_takes.values()),
        "trained_without_take": sum(s == "trained" and p not in of_takes for p, s in states.items()),
        "positions_missing": len(set(range(max(states, default=-1) + 1)) - set(states)),
        "ended_without_reason": unexplained,
        "gaps_in_takes": sum(a != b for a, b in zip(ids, range(1, len(ids) + 1), strict=True)),
        "gaps_in_steps": sum(a != b for a, b in zip(steps, range(1, len(steps) + 1), strict=True)),
        "steps_told_differently": len(differing),
        "tokens_over_staleness": tokens["over_staleness"],
        "tokens_of_abandoned_weights": 0 if keep else tokens["abandoned"],
    }
    return {
        "ok": not any(wrong.values()),
        **wrong,
        "steps": len(steps),
        "steps_abandoned": told.abandoned_steps,
        "incarnations": len(told.begins),
        "groups_trained": len(of_takes),
        "tokens_trained": tokens["trained"],
        "groups_forgotten": tokens["forgotten_groups"],
        "oldest_token": oldest,
        "rows": dict(Counter(states.values())),
        "rows_open": sum(state in OPEN for state in states.values()),
    }


def main() -> int:
    """Check one run's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    found = check(parser.parse_args().run)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
