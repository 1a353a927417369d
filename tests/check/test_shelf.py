"""Every environment on the shelf as it is, and broken in each kind of way."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.check import check_env, rules
from agentrl.env import Env
from agentrl.envs.black_box import BlackBox
from agentrl.errors import ConfigError
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.pool import open_sandbox
from agentrl.types import Message, Row
from tests.check.mutations import OPERATORS, RELEASE, Operator, end_what_was_started

SHELF = Path(__file__).resolve().parents[2] / "envs"


def shelf() -> list[type[Env]]:
    """Every environment class of every module in envs/."""
    found = []
    for path in sorted(SHELF.glob("[a-z]*.py")):
        module = importlib.import_module(f"agentrl.envs.{path.stem}")
        found += [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and issubclass(value, Env) and value.__module__ == module.__name__
        ]
    return found


class Judged(BlackBox):
    """The black box's half with what its user brings: rows, and a reward that judges the answer."""

    def __init__(self, row: Row) -> None:
        super().__init__(row, reward="agentrl.reward.math:MathReward")

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        return ({"question": f"{n} + 2?", "answer": str(n + 2), "split": split} for n in range(8))

    def oracle(self, messages: list[Message]) -> str:
        return json.dumps({"answer": f"\\boxed{{{self.row['answer']}}}", "reward": 0.5})


ENVS = [Judged if env_class is BlackBox else env_class for env_class in shelf()]
# A sandbox or a server each costs seconds: these are broken in the ways that an issue is made of.
COSTLY = ("Code", "MathPython", "Shop", "ReasoningGym")
CORE: tuple[str, ...] = (
    *("unseeded", "shared-state", "step-after-end", "swapped-flags", "blocks-loop", "leaked-task", "leaked-process"),
    *("leaked-file", "reward-range", "reward-not-finite", "tool-schema", "template", "odd-input"),
)


@functools.cache
def boxes() -> bool:
    """Whether this machine offers bubblewrap."""
    try:
        open_sandbox(SandboxOptions(kind="bubblewrap"))
    except ConfigError:
        return False
    return True


def first_rows(env_class: type[Env], count: int) -> list[Row]:
    return list(itertools.islice(env_class.rows("train", 0), count))


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    RELEASE.clear()
    yield
    end_what_was_started()


def test_the_shelf_is_found() -> None:
    assert {"Calculator", "Countdown", "MathSingle", "GuessNumber", "Code", "Judged"} <= {env.__name__ for env in ENVS}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("env_class", ENVS, ids=lambda env_class: env_class.__name__)
def test_nothing_is_found_on_the_shelf(env_class: type[Env]) -> None:
    needs_boxes(env_class)
    report = check_env(env_class, reward_range=(0.0, 1.0), seconds=300.0)
    assert report.findings == (), report


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("env_class", ENVS, ids=lambda env_class: env_class.__name__)
def test_what_is_broken_is_found(env_class: type[Env], monkeypatch: pytest.MonkeyPatch) -> None:
    needs_boxes(env_class)
    monkeypatch.setattr(rules, "SETTLE_SECONDS", 0.05)  # what is left on purpose does not go away later
    # One way for each code, another one for each environment: over the shelf all are used.
    turn = ENVS.index(env_class)
    ways: dict[str, list[Operator]] = {}
    for operator in OPERATORS:
        ways.setdefault(operator.code, []).append(operator)
    codes = CORE if env_class.__name__ in COSTLY else tuple(ways)
    operators = [ways[code][turn % len(ways[code])] for code in codes]
    rows = first_rows(env_class, 1)
    missed = []
    for operator in operators:
        broken = operator.apply(env_class)
        if operator.needs_tools and not has_tools(env_class, rows[0]):
            continue
        report = check_env(broken, rows, reward_range=(0.0, 1.0), seconds=300.0)
        if operator.code not in report.codes:
            missed.append(f"{operator.name}: {operator.code} is not in {sorted(report.codes)}")
    assert not missed, "\n".join(missed)


def has_tools(env_class: Callable[[Row], Any], row: Row) -> bool:
    return bool(env_class(row).tools)


def needs_boxes(env_class: type[Env]) -> None:
    if env_class.__name__ in ("Code", "MathPython") and not boxes():
        pytest.skip("no bubblewrap on this machine")
