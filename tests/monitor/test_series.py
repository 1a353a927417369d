"""metrics.jsonl as columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.monitor.series import MAX_POINTS, Cursor, Series


def write(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps({"time": 1.0, **line}) + "\n")


def step(number: int, **figures: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, **figures}


def test_rows_and_events_come_once_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = Series(path)
    series.refresh()
    assert series.since(Cursor(), [])["step"] == []
    write(path, step(1, loss=0.5), {"kind": "eval", "step": 1}, {"kind": "take", "step": 2, "groups": [1]})
    series.refresh()
    first = series.since(Cursor(), [])
    assert (first["step"], first["columns"], len(first["events"])) == ([1], {"loss": [0.5]}, 1)
    write(path, step(2, loss=None, lr=0.1, envs={"A/b": {"reward": 0.25, "reward_error": None}}))
    series.refresh()
    more = series.since(Cursor(*first["cursor"]), [])
    assert (more["from"], more["step"], more["events"]) == (1, [2], [])
    assert more["columns"] == {"loss": [None], "lr": [0.1], "envs/A/b/reward": [0.25], "envs/A/b/reward_error": [None]}
    assert series.last() == {"step": 2, "lr": 0.1, "envs/A/b/reward": 0.25}


def test_a_resume_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *(step(n, loss=n) for n in range(1, 6)))
    series = Series(path)
    series.refresh()
    cursor = Cursor(*series.since(Cursor(), [])["cursor"])
    write(path, {"kind": "begin", "step": 3}, step(4, loss=40))
    series.refresh()
    found = series.since(cursor, [])
    assert found["from"] == 0
    assert (found["step"], found["columns"]["loss"]) == ([1, 2, 3, 4], [1, 2, 3, 40])


def test_torn_lines_wait_for_their_end_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = Series(path)
    path.write_bytes(b'{"kind": "step", "time": 1, "step": 1, "lo')
    series.refresh()
    assert series.steps == []
    with path.open("ab") as file:
        file.write(b'ss": 0.5}\n\xff\xfe broken\n[1]\n{"kind": "step", "time": 2, "step": 2}\n')
    series.refresh()
    assert (series.steps, series.columns) == ([1, 2], {"loss": [0.5]})


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *(step(n) for n in range(1, 6)))
    series = Series(path)
    series.refresh()
    cursor = Cursor(*series.since(Cursor(), [])["cursor"])
    path.unlink()
    write(path, step(1))
    series.refresh()
    assert series.since(cursor, [])["step"] == [1]


def test_a_long_run_is_thinned(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *(step(n, loss=n) for n in range(1, 2 * MAX_POINTS + 2)))
    series = Series(path)
    series.refresh()
    found = series.since(Cursor(), ["loss", "none"])
    assert found["step"] == list(range(1, 2 * MAX_POINTS + 2, 3))
    assert list(found["columns"]) == ["loss"]
