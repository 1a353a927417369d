"""Rows from files, Python objects and the hub's library, and errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.data import MIXED, env_of, load_rows, mix_rows, take_rows
from agentrl.errors import ConfigError, DataError
from agentrl.types import Row

ROWS = [{"question": "1+1", "answer": 2}, {"question": "2+2", "answer": 4}, {"question": "北京 😀", "answer": 0}]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8")
    return path


def test_jsonl_with_blank_lines_a_limit_and_renamed_columns(jsonl: Path) -> None:
    assert load_rows("rows.jsonl", base=jsonl.parent) == ROWS
    assert load_rows(str(jsonl), limit=1, columns={"question": "prompt"}) == [{"prompt": "1+1", "answer": 2}]


def test_a_missing_field_is_named_with_file_and_line(jsonl: Path) -> None:
    with jsonl.open("a", encoding="utf-8") as file:
        file.write('\n{"question": "3+3"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:6 has no field 'answer'; it has \['question'\]"):
        load_rows(str(jsonl), needed=["question", "answer"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": ', r"bad\.jsonl:2 is not JSON"),
        ('{"a": 1}\n[1, 2]', r"bad\.jsonl:2 is a list, not an object with fields"),
        ("", "has no rows"),
    ],
)
def test_bad_files_say_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(str(path))


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*ROWS, {"question": "x", "answer": None}]), path)
    assert load_rows(str(path), limit=3) == ROWS
    with pytest.raises(DataError, match=r"rows\.parquet, row 3 has no field 'answer'"):
        load_rows(str(path), needed=["answer"])
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"cannot read .*rows\.parquet"):
        load_rows(str(path))


def test_the_hubs_library_on_a_local_folder(
    jsonl: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    folder = jsonl.parent / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    assert load_rows("hub:folder", base=jsonl.parent) == ROWS
    with pytest.raises(DataError, match="split 'nosuch'"):
        load_rows("hub:folder", base=jsonl.parent, split="nosuch")


def test_python_objects_by_file_and_what_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "made_rows.py").write_text("def rows():\n    yield {'a': 1}\n\nlisted = [{'a': 2}]\nnothing = 3\n")
    assert load_rows("made_rows.py:rows", base=tmp_path) == [{"a": 1}]
    assert load_rows("made_rows.py:listed", base=tmp_path) == [{"a": 2}]
    with pytest.raises(DataError, match="is a int, not an iterable"):
        load_rows("made_rows.py:nothing", base=tmp_path)
    with pytest.raises(ConfigError, match=r"there is no file .*write 'hub:openai/gsm8k'"):
        load_rows("openai/gsm8k", base=tmp_path)
    with pytest.raises(DataError, match="row 1 of 'x' is a int"):
        take_rows([{"a": 1}, 2], "x")


def test_a_mixture_keeps_its_shares_at_every_point_and_leaves_no_row_out() -> None:
    parts = {"a": [{"i": i} for i in range(60)], "b": [{"i": i} for i in range(5)], "c": [{"i": 0}]}
    weights = {"a": 3.0, "b": 1.0, "c": 0.5}
    mixed = mix_rows(parts, weights)
    assert len(mixed) == 90
    counts = dict.fromkeys(parts, 0)
    for at, row in enumerate(mixed, 1):
        counts[env_of(row, "?")] += 1
        assert all(abs(counts[name] - at * weights[name] / 4.5) <= 1.5 for name in parts), (at, counts)
    assert counts == {"a": 60, "b": 20, "c": 10}
    assert [row["i"] for row in mixed if row[MIXED] == "a"] == list(range(60))
    assert [row["i"] for row in mixed if row[MIXED] == "b"][:6] == [0, 1, 2, 3, 4, 0]
    assert mix_rows(parts, weights) == mixed


def test_a_mixture_may_not_be_endless() -> None:
    parts: dict[str, list[Row]] = {"a": [{}] * 1000, "b": [{}]}
    with pytest.raises(ConfigError, match="make an epoch of 10001000 rows"):
        mix_rows(parts, {"a": 0.001, "b": 10.0})


def test_a_row_of_no_mixture_is_of_the_default() -> None:
    assert env_of({"a": 1}, "Maths") == "Maths"
