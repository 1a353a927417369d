"""`agentrl init env NAME`: a working environment and its test, two files to change into your own."""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.errors import ConfigError

_ENV = '''"""$NAME: write a word backwards, with one hint.

    user       Write the word 'stone' backwards.
    assistant  enots                                                               1.0

Change this into your own environment, then:

    agentrl check $FILE:$CLASS
    agentrl play $FILE:$CLASS
    agentrl eval $FILE:$CLASS --base-url http://localhost:8000/v1 --model NAME -n 50
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl import Env, Message, Row, Step
from agentrl.errors import ContractError

WORDS = {
    "train": ("stone", "river", "cloud", "paper", "light", "green", "house", "music"),
    "eval": ("horse", "table", "night", "bread"),
}


class $CLASS(Env):
    """A row is `{"word"}`. A right answer earns 1, after a hint `second`."""

    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, second: float = 0.5) -> None:
        super().__init__(row)
        self.second = second

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """The words; a data file replaces this: `data.train = "rows.jsonl"`."""
        return ({"word": word} for word in WORDS[split])

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """The task. What is random comes from `self.generator(seed)`."""
        self.tries, self.over = 0, False
        return [{"role": "user", "content": f"Write the word '{self.row['word']}' backwards."}], {}

    async def step(self, action: Message) -> Step:
        """Judge the answer; a model may say anything, or nothing."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        self.tries += 1
        right = (action.get("content") or "").strip().lower() == self.row["word"][::-1]
        self.over = right or self.tries == 2
        if self.over:
            reward = (1.0 if self.tries == 1 else self.second) if right else 0.0
            return Step([], reward, True, False, {"tries": self.tries})
        hint = f"No. It begins with '{self.row['word'][-1]}'. Answer with the word alone."
        return Step([{"role": "user", "content": hint}], 0.0, False, False, {})

    def oracle(self, messages: list[Message]) -> str:
        """The right answer, for `agentrl check` and `agentrl play --oracle`."""
        return str(self.row["word"][::-1])
'''

_TEST = '''"""Tests of $NAME: the checker's rules, and what each answer earns."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

from agentrl.check import check_env

# Loaded by its path, so that the test runs from any folder.
_spec = importlib.util.spec_from_file_location("$NAME", Path(__file__).with_name("$FILE"))
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
$CLASS: Any = _module.$CLASS


def test_it_keeps_the_contract() -> None:
    report = check_env($CLASS)
    assert not report.findings, report


def test_what_answers_earn() -> None:
    async def earned(*answers: str) -> list[float]:
        env = $CLASS({"word": "stone"})
        await env.reset(seed=1)
        steps = [await env.step({"role": "assistant", "content": answer}) for answer in answers]
        assert steps[-1].terminated
        return [step.reward for step in steps]

    assert asyncio.run(earned("enots")) == [1.0]
    assert asyncio.run(earned("stone", "Enots ")) == [0.0, 0.5]
    assert asyncio.run(earned("", "?")) == [0.0, 0.0]
'''


def new_env(name: str, folder: Path) -> tuple[Path, Path]:
    """Write `name.py` and `test_name.py` to `folder`; ConfigError where the name cannot be, or a file is there."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"{name!r} is no module name: small letters, digits and _, e.g. my_env")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: make it first")
    files = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in files:
        if path.exists():
            raise ConfigError(f"{path} is there already: choose another name, or remove it")
    for path, text in zip(files, (_ENV, _TEST), strict=True):
        class_name = "".join(part.capitalize() for part in name.split("_"))
        path.write_text(text.replace("$CLASS", class_name).replace("$FILE", f"{name}.py").replace("$NAME", name))
    return files
