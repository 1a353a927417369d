"""The config mechanism: what is accepted, and what a person is told when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, model_validator

from agentrl.config import load, resolve_object, to_toml
from agentrl.errors import ConfigError


class Train(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    lr: float = 1e-5
    warmup: int = 0
    path: Path | None = None


class Rollout(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    staleness: int = 4
    drop: bool = False

    @model_validator(mode="after")
    def _knobs(self) -> Rollout:
        if self.drop and self.staleness == 0:
            raise ValueError("drop has no effect with staleness = 0: remove it")
        return self


class Run(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    train: Train = Train()
    rollout: Rollout | None = None
    args: dict[str, object] = {}


TEXT = """
name = "x"  # a comment

[train]
lr = 3e-4

[rollout]
staleness = 2
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def test_file_and_overrides_are_merged(toml: Path) -> None:
    run = load(
        Run, toml, ["train.warmup=7", "rollout.staleness=0", "args.a.b=[1, 2]", "train.path=some/where", "name='y'"]
    )
    assert run.train == Train(lr=3e-4, warmup=7, path=Path("some/where"))
    assert run.rollout == Rollout(staleness=0)
    assert run.args == {"a": {"b": [1, 2]}}
    assert run.name == "y"


def test_unknown_key_names_line_and_nearest(toml: Path) -> None:
    toml.write_text(TEXT.replace("staleness", "stalness"))
    with pytest.raises(
        ConfigError, match=r"run\.toml:8: rollout\.stalness: unknown key 'stalness'; did you mean 'staleness'\?"
    ):
        load(Run, toml)


def test_unknown_section_names_line(toml: Path) -> None:
    toml.write_text(TEXT + "\n[trian]\nlr = 1\n")
    with pytest.raises(ConfigError, match=r"run\.toml:10: trian: unknown key 'trian'; did you mean 'train'\?"):
        load(Run, toml)


def test_key_in_the_wrong_section_is_found_elsewhere(toml: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"override train\.staleness: unknown key 'staleness'; there is 'rollout\.staleness'"
    ):
        load(Run, toml, ["train.staleness=1"])


def test_every_fault_is_listed_at_once(toml: Path) -> None:
    toml.write_text(TEXT.replace("3e-4", '"fast"').replace("= 2", "= 2.5"))
    with pytest.raises(ConfigError) as caught:
        load(Run, toml)
    first, second = str(caught.value).splitlines()
    assert first.endswith(
        "run.toml:5: train.lr: input should be a valid number, unable to parse string as a number, got 'fast'"
    )
    assert "run.toml:8: rollout.staleness: " in second
    assert "got 2.5" in second


def test_dead_knob_and_missing_key() -> None:
    with pytest.raises(ConfigError, match="drop has no effect with staleness = 0: remove it"):
        load(Run, None, ["name=x", "rollout.drop=true", "rollout.staleness=0"])
    with pytest.raises(ConfigError, match="name: is required and has no default"):
        load(Run)


@pytest.mark.parametrize("override", ["train.lr", "=3", "train..lr=1", "name.inner=3"])
def test_malformed_override(toml: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load(Run, toml, [override])


def test_unreadable_and_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        load(Run, tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("name = \n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML.*line 1"):
        load(Run, bad)


def test_written_config_reads_back_equal(toml: Path, tmp_path: Path) -> None:
    run = load(
        Run, toml, ["train.path=a/b", 'name="quote \\" and ünïcode \\u007f"', "args.deep.list=[1, 2.5, {a = true}]"]
    )
    again = tmp_path / "again.toml"
    again.write_text(to_toml(run))
    assert load(Run, again) == run
    assert "# warmup = 0" in again.read_text()


def test_a_default_without_effect_is_not_written_as_given(tmp_path: Path) -> None:
    class Picky(BaseModel):
        mode: str = "a"
        only_b: int = 1

        @model_validator(mode="after")
        def _effective(self) -> Picky:
            if self.mode == "a" and "only_b" in self.model_fields_set:
                raise ValueError("only_b has no effect with mode 'a'")
            return self

    path = tmp_path / "picky.toml"
    path.write_text(to_toml(Picky(mode="a")))
    assert load(Picky, path) == Picky(mode="a")


def test_objects_by_dotted_path_and_by_file(tmp_path: Path) -> None:
    assert resolve_object("agentrl.errors:ConfigError") is ConfigError
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 41\n")
    (tmp_path / "mine.py").write_text("from helper_of_mine import VALUE\nclass A:\n    x = VALUE + 1\n")
    assert resolve_object("mine.py:A.x", base=tmp_path) == 42
    assert resolve_object("mine.py:A", base=tmp_path) is resolve_object(f"{tmp_path}/mine.py:A")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("agentrl.errors", "names no object: write 'package.module:Name'"),
        ("agentrl.errors:ConfgError", "has no 'ConfgError'; did you mean 'ConfigError'"),
        ("agentrl.nowhere:X", "there is no module 'agentrl.nowhere'"),
        ("nowhere.py:X", "there is no file"),
        ("broken.py:X", "cannot be imported: ZeroDivisionError"),
        ("imports.py:X", "cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_unresolvable_objects(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "imports.py").write_text("import not_there\n")
    with pytest.raises(ConfigError, match=message):
        resolve_object(spec, base=tmp_path)
