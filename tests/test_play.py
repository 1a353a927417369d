"""`agentrl play`: person, oracle and chance; `agentrl init env`; `agentrl check`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli import app
from agentrl.config import resolve_object
from agentrl.env import Env
from agentrl.errors import ConfigError
from agentrl.play import play, summary
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Step, Stop


class Ask(Env):
    """Look the word up, then say it."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
        self.tools = (self.look,)
        return [{"role": "user", "content": "Which word?"}], {}

    async def step(self, action: Message) -> Step:
        if action.get("tool_calls"):
            return Step(await run_tools(self.tools, action), 0.0, False, False, {})
        return Step([], float(action["content"] == "two\nlines"), True, False, {"reward_parts": {"exact": 1.0}})

    @tool
    async def look(self, at: str) -> str:
        """Look somewhere.

        Args:
            at: where
        """
        return f"{at}: two lines"


def lines_of(*lines: str) -> Any:
    """A person who types these lines, and then Ctrl-D."""
    left = iter(lines)

    def ask(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return ask


async def test_a_person_calls_tools_and_answers_in_several_lines() -> None:
    said: list[str] = []
    ask = lines_of("/help", "/tools", '/call look {"at": "here"}', "two\\", "lines")
    episode = await play(Ask, {}, "person", seed=1, max_turns=9, say=said.append, ask=ask)
    assert summary(episode) == "finished after 2 turns, reward 1.0, exact 1"
    assert said[0] == "[user] Which word?"
    assert "/call NAME" in said[1]
    assert '"name": "look"' in said[2]
    assert said[3] == "[tool] here: two lines"


async def test_a_person_may_leave() -> None:
    episode = await play(Ask, {}, "person", seed=1, max_turns=9, say=lambda text: None, ask=lines_of())
    assert episode.stop is Stop.AGENT_ERROR
    assert "stopped by the player" in summary(episode)


async def test_without_an_oracle_the_remedy_is_told() -> None:
    with pytest.raises(ConfigError, match="Ask knows no answer here: define `oracle`"):
        await play(Ask, {}, "oracle", seed=1, max_turns=9, say=lambda text: None, ask=lines_of())


async def test_chance_is_seeded() -> None:
    heard: list[list[str]] = [[], []]
    for said in heard:
        await play(Ask, {}, "random", seed=3, max_turns=5, say=said.append, ask=lines_of())
    assert heard[0] == heard[1]
    assert len(heard[0]) > 1


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("agentrl_user_"):
            del sys.modules[name]


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_from_nothing_to_a_checked_and_played_environment(place: Path) -> None:
    assert run("init", "env", "my_env").output.split() == ["my_env.py", "test_my_env.py"]
    checked = run("check", "my_env.py:MyEnv", "--strict")
    assert checked.exit_code == 0, checked.output
    assert "0 errors, 0 warnings" in checked.output
    played = run("play", "my_env.py:MyEnv", "--oracle", "--row", "2")
    assert "[user] Write the word 'cloud' backwards." in played.output
    assert played.output.endswith("finished after 1 turns, reward 1.0\n")
    typed = run("play", "my_env.py:MyEnv", "--row", '{"word": "ab"}', "--set", "env.args.second=0.25", stdin="ab\nba\n")
    assert typed.output.endswith("finished after 2 turns, reward 0.25\n")
    written = (
        resolve_object("test_my_env.py:test_it_keeps_the_contract"),
        resolve_object("test_my_env.py:test_what_answers_earn"),
    )
    for test in written:
        test()
    again = run("init", "env", "my_env")
    assert again.exit_code == 2
    assert "my_env.py is there already" in again.output
    assert run("init", "env", "My-Env").exit_code == 2


def test_the_check_fails_with_the_remedy(place: Path) -> None:
    run("init", "env", "bad")
    text = Path("bad.py").read_text()
    Path("bad.py").write_text(text.replace('(action.get("content") or "")', 'action["content"]'))
    checked = run("check", "bad.py:Bad")
    assert checked.exit_code == 1
    assert "error odd-input: an answer without content: step raised KeyError: 'content'" in checked.output
    assert "do not raise" in checked.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["check", "nowhere.py:X"], "there is no file"),
        (["check", "my_env.py:MyEnv", "--set", "env.args.tempo=1"], "env.args does not fit"),
        (["play", "my_env.py:MyEnv", "--oracle", "--random"], "exclude each other"),
        (["play", "my_env.py:MyEnv", "--row", "99"], "there are 8 rows"),
        (["play", "my_env.py:MyEnv", "--row", "[1]"], "must be a number or a JSON object"),
        (["play", "my_env.py:MyEnv", "--row", "{"], "neither a number nor JSON"),
    ],
)
def test_input_that_cannot_work(place: Path, arguments: list[str], text: str) -> None:
    run("init", "env", "my_env")
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.split())
