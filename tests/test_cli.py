"""The commands, with input that cannot work: one clear message, the right exit code, nothing started, nothing left."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli import app
from agentrl.testing.tiny import make_tiny_model

ENV = """
from agentrl.env import Env
from agentrl.types import Step

class Echo(Env):
    def __init__(self, row, *, bonus=0.0):
        super().__init__(row)
        self.bonus = bonus
    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.row["word"]}], {}
    async def step(self, action):
        return Step([], 1.0 if self.row["word"] in (action["content"] or "") else 0.0, True, False, {})

class Raises(Echo):
    async def reset(self, *, seed=None, options=None):
        raise RuntimeError("no license for this simulator")

class Wrong(Echo):
    async def reset(self, *, seed=None, options=None):
        return "hello"

class Closes(Echo):
    async def close(self):
        raise RuntimeError("cannot close")

class NotAnEnv:
    pass
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, an environment, rows and a config that would run."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", layers=1, hidden=32, intermediate=32)
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "rows.jsonl").write_text('{"word": "a"}\n{"word": "b"}\n')
    (tmp_path / "run.toml").write_text(
        'name = "x"\nmodel = "model"\n[env]\npath = "env.py:Echo"\n[data]\ntrain = "rows.jsonl"\neval = "rows.jsonl"\n'
    )
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    (tmp_path / "talk.jsonl").write_text(f"{json.dumps(talk)}\n" * 20)
    (tmp_path / "sft.toml").write_text('name = "s"\nmodel = "model"\n[sft]\ndata = "talk.jsonl"\n')
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(result: Result, *texts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.output.startswith("error: ")
    assert "Traceback" not in result.output
    flat = " ".join(result.output.split())
    for text in texts:
        assert text in flat
    assert not Path("runs").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["model=nowhere"], ["model = 'nowhere': there is no such folder", "hf download"]),
        (["model=runs.toml"], ["there is no such folder"]),
        (["trian.lr=1"], ["override trian", "unknown key 'trian'; did you mean 'train'?"]),
        (["train.lr=fast"], ["train.lr", "valid number", "got 'fast'"]),
        (["env.path=env.py:Ecko"], ["env.path", "has no 'Ecko'; did you mean 'Echo'?"]),
        (["env.path=env.py:NotAnEnv"], ["not a subclass of agentrl's Env"]),
        (["env.args.bonos=1"], ["env.args does not fit Echo", "bonos"]),
        (["env.path=env.py:Raises"], ["env.py:Raises.reset", "RuntimeError: no license for this simulator"]),
        (["env.path=env.py:Wrong"], ["env.py:Wrong.reset", "reset must return (messages, info)"]),
        (["env.path=env.py:Closes"], ["env.py:Closes.close", "RuntimeError: cannot close"]),
        (["data.train=none.jsonl"], ["there is no file", "none.jsonl"]),
        (["data.columns.word=text"], ["KeyError: 'word'", "the row has the fields text"]),
        (["engine.context_length=5"], ["tokens long and the context has 5"]),
        (["rollout.groups_per_step=4", "train.batch_groups=8"], ["are the same number by meaning"]),
        (["rollout.samples=1", "rollout.filter_equal=false"], ["every advantage would be 0"]),
        (["eval.every=0", "eval.rows=3"], ["eval.rows has no effect with eval.every = 0"]),
        (["engine.python=x"], ["python has no effect with kind = 'embedded'"]),
        (["algorithm.name=sft"], ["start it with `agentrl sft`"]),
        (["name=a/b"], ["name", "pattern", "got 'a/b'"]),
    ],
)
def test_train_refuses_before_anything_starts(place: Path, overrides: Sequence[str], texts: Sequence[str]) -> None:
    refused(run("train", "run.toml", *overrides), *texts)


def test_a_row_without_the_needed_field_is_named(place: Path) -> None:
    (place / "rows.jsonl").write_text('{"wort": "a"}\n')
    refused(run("train", "run.toml"), "env.py:Echo.reset with the first training row raised KeyError: 'word'", "wort")


def test_a_model_without_parts_is_named(place: Path) -> None:
    (place / "model" / "chat_template.jinja").unlink()
    refused(run("train", "run.toml"), "has no chat template", "chat_template.jinja")
    (place / "model" / "model.safetensors").unlink()
    refused(run("train", "run.toml"), "holds no weights")
    (place / "model" / "config.json").unlink()
    refused(run("sft", "sft.toml"), "has no config.json")


def test_a_port_in_use_is_named(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(run("train", "run.toml", f"endpoint.port={port}"), f"endpoint.port = {port}: Address already in use")
        refused(run("train", "run.toml", f"engine.port={port}"), f"engine.port = {port}: Address already in use")


def test_a_run_folder_that_cannot_be_used_is_named(place: Path) -> None:
    (place / "file").write_text("")
    result = run("train", "run.toml", "run_dir=file")
    refused(result, "the run folder", "cannot be written: Not a directory; set run_dir")
    refused(run("train", "run.toml", "--resume"), "--resume:", "holds no run")
    (place / "old" / "x").mkdir(parents=True)
    (place / "old" / "x" / "config.toml").write_text("")
    refused(run("train", "run.toml", "run_dir=old"), "already holds a run: continue it with --resume")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{}", "talk.jsonl:1 has no field 'messages'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "conversation 0: messages[0] has role 'robot'"),
        ("{", "talk.jsonl:1 is not JSON"),
    ],
)
def test_sft_refuses_conversations_it_cannot_use(place: Path, line: str, text: str) -> None:
    (place / "talk.jsonl").write_text(line + "\n")
    refused(run("sft", "sft.toml"), text)


def test_sft_refuses_what_needs_rollouts(place: Path) -> None:
    refused(run("sft", "sft.toml", "algorithm.name=grpo"), "start it with `agentrl train`")
    refused(run("sft", "sft.toml", "rollout.samples=2"), "unknown key 'rollout'")
    refused(run("sft", "sft.toml", "cluster.kind=ray"), "places the workers of `agentrl train` alone")
    refused(run("sft", "sft.toml", "cluster.rollout_workers=2"), "cluster.rollout_workers has no effect")
    refused(run("sft", "sft.toml", "sft.eval_share=0", "sft.eval_every=3"), "eval_every has no effect")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "nowhere has no tokenizer.json"),
        (["model", "engine.kindd=x"], "did you mean 'kind'?"),
        (["model", "train.steps=3"], "unknown key 'train'"),
    ],
)
def test_serve_refuses_what_cannot_be_served(place: Path, arguments: Sequence[str], text: str) -> None:
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert (done.exit_code, text in done.stderr) == (2, True), done.stderr


def test_status_and_version(place: Path) -> None:
    assert run("status", "model").exit_code == 2
    told = run("version").output
    assert "agentrl 0." in told
    assert "deepspeed" in told
