"""The checker: each operator is found on a toy environment, nothing is found on a good one, and what it says."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.check import Code, check_env, rules
from agentrl.check.actions import said
from agentrl.check.findings import Findings
from agentrl.check.rewards import measure
from agentrl.check.rules import Case
from agentrl.check.template import shipped_template
from agentrl.check.transcript import Booth, replay
from agentrl.check.watch import Watch
from agentrl.env import Env
from agentrl.errors import ContractError, SandboxLost
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Row, Step
from tests.check.mutations import OPERATORS, RELEASE, Operator, end_what_was_started

OTHER_WAYS = ("folder", "renamed", "database")


class Toy(Env):
    """Two turns: the sum of two numbers, with a hint after a wrong answer; or ask the tool."""

    reward_range = (0.0, 1.0)

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        return ({"a": n, "b": 3 if split == "train" else 4} for n in range(50))

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
        self.tools = (self.add,)
        self.c = self.generator(seed).randint(1, 1_000_000)
        self.tries, self.over = 0, False
        return [{"role": "user", "content": f"{self.row['a']} + {self.row['b']} + {self.c} = ?"}], {}

    async def step(self, action: Message) -> Step:
        if self.over:
            raise ContractError("the episode is over; call reset first")
        if action.get("tool_calls"):
            return Step(await run_tools(self.tools, action), 0.0, False, False, {})
        self.tries += 1
        right = (action.get("content") or "").strip() == str(self._sum)
        self.over = right or self.tries == 2
        hint: list[Message] = [] if self.over else [{"role": "user", "content": "wrong"}]
        return Step(hint, float(right), self.over, False, {})

    def oracle(self, messages: list[Message]) -> str:
        return str(self._sum)

    @property
    def _sum(self) -> int:
        return int(self.row["a"]) + int(self.row["b"]) + self.c

    @tool
    async def add(self, a: int, b: int = 0) -> str:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return str(a + b)


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    RELEASE.clear()
    yield
    end_what_was_started()


def test_a_good_environment_has_no_findings() -> None:
    report = check_env(Toy)
    assert report.findings == (), report
    assert report.ok
    assert report.cost is not None
    assert "Toy:" in str(report)


QUICK = {
    *("contract", "unseeded", "shared-state", "step-after-end", "swapped-flags", "blocks-loop", "leaked-task"),
    *("leaked-process", "reward-range", "reward-not-finite", "tool-schema", "template", "odd-input"),
}
# One for each code that most mistakes are of, to be fast; the rest with the slow tests.
FIRST = {operator.code: operator for operator in reversed(OPERATORS) if operator.code in QUICK}.values()
WAYS = [op if op in FIRST else pytest.param(op, marks=pytest.mark.slow) for op in OPERATORS]


@pytest.mark.parametrize("operator", WAYS, ids=[operator.name for operator in OPERATORS])
def test_what_is_broken_is_found(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SETTLE_SECONDS", 0.05)
    report = check_env(operator.apply(Toy), [{"a": 1, "b": 2}])
    assert operator.code in report.codes, report
    (finding,) = [f for f in report.findings if f.code.label == operator.code]
    assert finding.code.remedy in str(report)


async def test_it_works_inside_a_running_loop() -> None:
    assert check_env(Toy, [{"a": 1, "b": 2}]).ok


class Sync(Env):
    """A plain environment: it may block, and is always called from one thread, as SQLite demands."""

    reward_range = (0.0, 1.0)

    def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[list[Message], Info]:
        self.base = sqlite3.connect(":memory:")
        time.sleep(0.0001)
        self.over = False
        return [{"role": "user", "content": "?"}], {}

    def step(self, action: Message) -> Step:  # type: ignore[override]
        if self.over:
            raise ContractError("the episode is over; call reset first")
        self.over = True
        (one,) = self.base.execute("select 1").fetchone()
        return Step([], float(action.get("content") == str(one)), True, False, {})

    def close(self) -> None:  # type: ignore[override]
        if not hasattr(self, "base"):
            return
        self.base.close()


def test_a_plain_environment_may_block() -> None:
    report = check_env(Sync, [{}], oracle=lambda env, messages: "1")
    assert report.findings == (), report


def test_an_oracle_that_is_not_the_best() -> None:
    report = check_env(Toy, [{"a": 1, "b": 2}], oracle=lambda env, messages: "0")
    assert report.codes == {"oracle", "empty-pays"}
    assert "the oracle earned 0.0, and reward_range ends at 1.0" in str(report)


def test_a_call_that_never_returns_is_cut_off() -> None:
    async def forever(self: Any, step: Step) -> Step:
        await asyncio.get_running_loop().create_future()
        return step

    class Hangs(Toy):
        async def step(self, action: Message) -> Step:
            return await forever(self, await super().step(action))

    assert check_env(Hangs, [{"a": 1, "b": 2}], seconds=1.0).codes == {"hang"}


def test_rows_are_checked_too() -> None:
    class Rows(Toy):
        made = iter(range(10**6))

        @classmethod
        def rows(cls, split: str, seed: int) -> Iterator[Row]:
            return ({"a": next(cls.made), "b": 1, "tags": {1}} for _ in range(8))

    assert {"rows", "not-json"} <= check_env(Rows).codes

    class Same(Toy):
        @classmethod
        def rows(cls, split: str, seed: int) -> Iterator[Row]:
            return ({"a": n, "b": 1} for n in range(8))

    report = check_env(Same)
    assert report.codes == {"rows-overlap"}
    assert report.ok, "a warning only"


def test_what_cannot_be_played_is_said() -> None:
    with pytest.raises(ContractError, match="makes no rows of its own"):
        check_env(Sync)
    with pytest.raises(ContractError, match="not a subclass"):
        check_env(int)  # type: ignore[arg-type]

    class Lost(Toy):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
            raise SandboxLost("no Docker here")

    with pytest.raises(SandboxLost, match="no Docker here"):
        check_env(Lost, [{"a": 1, "b": 2}])


@pytest.mark.slow
async def test_a_coroutine_that_computes_for_long_is_told() -> None:
    class Burns(Toy):
        async def step(self, action: Message) -> Step:
            until = time.thread_time() + 0.6
            while time.thread_time() < until:
                pass
            return await super().step(action)

    findings = Findings()
    booth = Booth(lambda: Burns({"a": 1, "b": 2}), findings, Watch(findings), 600.0)
    case = Case(Burns, Burns, {"a": 1, "b": 2}, 7, booth, findings, shipped_template(), lambda *_: None, None)
    reference = await booth.play(replay([said("1")]), seed=7, turns=1)
    cost = await measure(case, reference)
    assert Code.SLOW in findings
    assert cost is not None
    assert cost.step_cpu_ms > 500


def test_codes_are_stable_and_unique() -> None:
    values = [code.label for code in Code]
    assert len(set(values)) == len(values) == 34
    assert all(value == value.lower().replace("_", "-") for value in values)


def test_the_page_explains_every_code() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    for code in Code:
        kind = "error" if code.error else "warning"
        assert f"| `{code.label}` | {kind} |" in page
        assert code.remedy in page


@pytest.mark.parametrize("how", ["file", *(pytest.param(how, marks=pytest.mark.slow) for how in OTHER_WAYS)])
def test_files_that_are_left_anywhere_are_found_and_those_that_go_are_not(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "SETTLE_SECONDS", 0.05)  # what is left on purpose does not go away later

    class Writes(Toy):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
            self.path = tmp_path / f"{how}-{uuid.uuid4()}"
            if how == "folder":
                self.path.mkdir()
            elif how == "renamed":
                (tmp_path / "partial").write_text("x")
                os.replace(tmp_path / "partial", self.path)
            elif how == "database":
                with closing(sqlite3.connect(self.path)) as base:
                    base.executescript("PRAGMA synchronous=OFF; PRAGMA journal_mode=OFF; CREATE TABLE t (x)")
            else:
                self.path.write_text("x")
            with (tmp_path / "all.log").open("a") as file:  # one for all of them is no leak
                file.write("an episode\n")
            return await super().reset(seed=seed, options=options)

    class Tidies(Writes):
        async def close(self) -> None:
            if hasattr(self, "path"):
                (self.path.rmdir if how == "folder" else self.path.unlink)()
                del self.path

    found = check_env(Writes)
    assert found.codes == {"leaked-temporary"}
    assert str(tmp_path / how) in str(found)
    assert check_env(Tidies).findings == ()
