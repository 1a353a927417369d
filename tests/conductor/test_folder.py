"""The run folder: whose it is, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.conductor import folder as folder_module
from agentrl.conductor.folder import RunFolder
from agentrl.errors import ConfigError


def test_a_run_is_not_overwritten_nor_shared(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    with pytest.raises(ConfigError, match="holds no run"):
        run.open(resume=True)
    run.open(resume=False)
    run.config.write_text("")
    assert run.locked
    with pytest.raises(ConfigError, match="already holds a run: continue it with --resume"):
        RunFolder(tmp_path / "a").open(resume=False)
    with pytest.raises(ConfigError, match="another agentrl process runs in"):
        RunFolder(tmp_path / "a").open(resume=True)
    run.close()
    assert not run.locked
    again = RunFolder(tmp_path / "a")
    again.open(resume=True)
    again.close()


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory; set run_dir"):
        RunFolder(tmp_path / "file" / "run").open(resume=False)


def test_an_incarnation_is_never_given_twice(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert [run.next_incarnation(), run.next_incarnation(), RunFolder(tmp_path).next_incarnation()] == [1, 2, 3]


def test_too_little_space_is_said_before_the_run(tmp_path: Path) -> None:
    RunFolder(tmp_path).need_space(1, "a checkpoint")
    with pytest.raises(ConfigError, match="MiB free and a checkpoint needs about 1048576000 MiB"):
        RunFolder(tmp_path).need_space(1000 << 40, "a checkpoint")


def test_weights_go_to_shared_memory_only_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    monkeypatch.setattr(folder_module, "SHARED_MEMORY", tmp_path / "shm")
    assert run.weights_folder(10) == run.path / "weights", "there is none"
    (tmp_path / "shm").mkdir()
    shared = run.weights_folder(10)
    assert shared.parent == tmp_path / "shm"
    (shared / "stale").write_text("")
    assert list(run.weights_folder(10).iterdir()) == [], "what a killed run left is removed"
    assert run.weights_folder(1 << 60) == run.path / "weights", "no room"
