"""Every block of the README and of docs/ is tried, page by page.

Python runs, in one namespace a page. TOML is loaded as a run's config. Commands are read by the command line that would
run them, with their settings; those of tutorial_first.md are run (train/test_first_run.py). What is none of these (YAML
of Prometheus, printed output, a diagram) is not executed.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.cli import app
from agentrl.conductor.config import RunConfig
from agentrl.config import load

ROOT = Path(__file__).resolve().parent.parent
ALL = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in ALL if "```python" in page.read_text()]
BASE = ["name='x'", "model='tiny'"]
ENV = "env.path='agentrl.envs.guess_number:GuessNumber'"
PLAYED = {"train", "rollout", "replay"}
"""Commands whose settings are those of a run."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    text = page.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start()].count("\n") + 1
        # The padding makes a traceback's line numbers those of the page.
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


def blocks(*kinds: str) -> Iterator[tuple[str, str]]:
    """The blocks of these kinds, by page and line."""
    for page in ALL:
        text = page.read_text()
        for block in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if block.group(1) in kinds:
                yield f"{page.name}:{text[: block.start()].count(chr(10)) + 1}", block.group(2)


TOML = list(blocks("toml"))


@pytest.mark.parametrize("text", [text for _, text in TOML], ids=[place for place, _ in TOML])
def test_settings_are_settings(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    given = tomllib.loads(text)
    path = [] if isinstance(given.get("env"), list) or "path" in given.get("env", {}) else [ENV]
    loaded = load(RunConfig, tmp_path / "run.toml", [*BASE, *path])
    assert given.keys() <= loaded.model_fields_set


def commands() -> Iterator[tuple[str, list[str]]]:
    """Our commands in shell blocks and in those without a language, without comments."""
    for place, text in blocks("", "bash", "sh", "shell"):
        for line in text.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ")
            if line.startswith(("agentrl ", "python ")) and "…" not in line.partition("  #")[0]:
                # A diagram explains its command in a column of its own, without a mark.
                yield place, shlex.split(re.split(r"\s{8,}", line)[0], comments=True)


COMMANDS = list(commands())


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=[f"{p} {' '.join(w[:3])}" for p, w in COMMANDS])
def test_commands_are_commands(words: list[str]) -> None:
    for word in words:
        if re.match(r"examples/\S+\.(py|toml|sh)$", word):
            assert (ROOT / word).exists(), word
    if words[0] == "python":
        return
    group: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(group, "commands"):
        group, rest = group.commands[rest[0]], rest[1:]
    name = words[1]
    # Options are known, and values of their types; nothing is invoked.
    context = group.make_context(name, list(rest))
    settings = context.params.get("overrides") or []
    if name in PLAYED and settings:
        load(RunConfig, None, [*BASE, ENV, *settings])


def test_the_pages_are_looked_at() -> None:
    assert len(TOML) >= 10
    assert len(COMMANDS) >= 30
