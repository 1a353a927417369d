"""Failures that users of other graders reported (`tests/cases/code_grading.jsonl`)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import SandboxLost
from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.options import CodeOptions
from agentrl.reward.code.task import parse_task
from agentrl.reward.code.verdict import Status
from agentrl.sandbox.pool import Pool
from agentrl.sandbox.types import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
LINES = (Path(__file__).parents[2] / "cases" / "code_grading.jsonl").read_text().splitlines()
CASES = [json.loads(line) for line in LINES]


class Unreachable:
    """A pool whose engine is gone."""

    @asynccontextmanager
    async def box(self) -> AsyncIterator[Sandbox]:
        raise SandboxLost("the engine does not answer")
        yield

    async def close(self) -> None: ...

    async def __aenter__(self) -> Unreachable:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_public_case(case: dict[str, Any], pool: Pool) -> None:
    given, expected = case["input"], case["expected"]
    used = Unreachable() if given.get("fault") == "sandbox_unreachable" else pool
    bounded = "max_wall_seconds" in expected
    options = CodeOptions(budget=3.0) if bounded else CodeOptions(seconds=60.0, budget=600.0)
    verdict = await CodeReward(used, options).grade(given["completion"], parse_task(given))
    assert verdict.status in expected.get("status_in", [expected.get("status")])
    if "reward" in expected:
        assert verdict.reward == expected["reward"]
    if "passed" in expected:
        assert (verdict.passed, verdict.total) == (expected["passed"], expected["total"])
    if "partial_reward_if_enabled" in expected:
        sharing = CodeReward(pool, options.model_copy(update={"partial": True}))
        partial = await sharing.grade(given["completion"], parse_task(given))
        assert partial.reward == expected["partial_reward_if_enabled"]
    if expected.get("sample_masked"):
        assert verdict.score().value is None
    if bounded:  # what sleeps for 1.5 s fits into it twice, what never ends not once
        assert verdict.passed <= 2


async def test_a_box_that_is_lost_once_costs_nothing(pool: Pool) -> None:
    class Once(Unreachable):
        lost = False

        @asynccontextmanager
        async def box(self) -> AsyncIterator[Sandbox]:
            if not self.lost:
                self.lost = True
                raise SandboxLost("gone")
            async with pool.box() as box:
                yield box

    task = parse_task({"mode": "stdio", "tests": [{"stdin": "", "stdout": "1"}]})
    assert (await CodeReward(Once()).grade("print(1)", task)).status is Status.PASSED
