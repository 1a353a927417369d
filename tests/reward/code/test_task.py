"""Rows of several data sets, a row's own judge, and the queue."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from agentrl.errors import DataError
from agentrl.reward.code.grade import CodeReward, find_program
from agentrl.reward.code.options import CodeOptions
from agentrl.reward.code.task import Mode, parse_task
from agentrl.reward.code.verdict import Status
from agentrl.sandbox.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_livecodebench_rows() -> None:
    tests = json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}])
    packed = base64.b64encode(zlib.compress(pickle.dumps(tests))).decode()
    row = {"public_test_cases": tests, "private_test_cases": packed, "metadata": '{"func_name": "total"}'}
    task = parse_task(row)
    assert (task.mode, task.entry_point, len(task.cases)) == (Mode.FUNCTIONAL, "Solution.total", 2)
    assert (task.cases[1].args, task.cases[1].expected) == (([1, 2], 3), 6)
    row = {"public_test_cases": '[{"input": "1", "output": "2", "testtype": "stdin"}]', "metadata": "{}"}
    assert parse_task(row).cases[0].stdin == "1"


async def test_a_pickle_in_a_row_runs_nothing() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(DataError, match="print"):
        parse_task({"private_test_cases": packed, "metadata": "{}"})


async def test_apps_rows() -> None:
    task = parse_task({"input_output": '{"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}'})
    assert (task.mode, task.cases[0].args, task.cases[0].expected) == (Mode.FUNCTIONAL, (1, 2), 3)
    assert parse_task({"input_output": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'}).cases[0].expected == "2\n"


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"mode": "essay", "tests": []},
        {"mode": "stdio"},
        {"mode": "stdio", "tests": [{"stdin": "", "stdout": 5}]},
        {"mode": "functional", "tests": [{"args": [1], "expected": 1}]},
        {"mode": "functional", "entry_point": "f", "tests": [{"args": [1]}]},
    ],
)
async def test_rows_that_cannot_be_used(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="not a coding task"):
        parse_task(row)


async def test_a_judge_decides_where_outputs_cannot_be_listed(reward: CodeReward) -> None:
    judge = """
def judge(stdin, stdout, expected):
    a, b = map(int, stdout.split())
    return a + b == int(stdin)
"""
    task = parse_task({"mode": "stdio", "judge": judge, "tests": [{"stdin": "9", "stdout": ""}] * 2})
    assert (await reward.grade_program("n = int(input())\nprint(1, n - 1)", task)).reward == 1.0
    verdict = await reward.grade_program("print('true')", task)
    assert (verdict.status, verdict.passed) == (Status.WRONG_ANSWER, 0)


async def test_preambles() -> None:
    task = parse_task(
        {
            "mode": "functional",
            "entry_point": "f",
            "prompt_preamble": "import math\n",
            "tests": [{"args": [], "expected": 3}],
        }
    )
    assert find_program("```python\ndef f(): return math.floor(3.5)\n```", task) == (
        "import math\n\n\ndef f(): return math.floor(3.5)\n"
    )


@pytest.mark.slow
async def test_many_at_once_are_served_in_turn_and_a_full_queue_is_no_verdict(pool: Pool) -> None:
    task = parse_task({"mode": "stdio", "tests": [{"stdin": "", "stdout": "1"}], "time_limit_s": 8})
    program = "import time\ntime.sleep(0.2)\nprint(1)"
    crowd = CodeReward(pool, CodeOptions(budget=8.0))
    async with pool.box(), pool.box():  # all there are, for longer than the limits: waiting does not count
        grading = [asyncio.create_task(crowd.grade_program(program, task)) for _ in range(5)]
        await asyncio.sleep(9.0)
    assert {(await one).status for one in grading} == {Status.PASSED}
    narrow = CodeReward(pool, CodeOptions(most_waiting=3))
    found = [
        verdict.status for verdict in await asyncio.gather(*(narrow.grade_program(program, task) for _ in range(9)))
    ]
    assert Status.INFRA_ERROR in found
    assert Status.PASSED in found
    slow = CodeReward(pool, CodeOptions(queue_seconds=0.05))
    found = [verdict.status for verdict in await asyncio.gather(*(slow.grade_program(program, task) for _ in range(6)))]
    assert Status.INFRA_ERROR in found


async def test_a_cancelled_grading_leaves_the_pool_usable(pool: Pool, reward: CodeReward) -> None:
    task = parse_task({"mode": "stdio", "tests": [{"stdin": "", "stdout": "1"}]})
    endless = asyncio.create_task(reward.grade_program("while True: pass", task))
    await asyncio.sleep(0.3)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert (await reward.grade_program("print(1)", task)).reward == 1.0


STATUSES = {
    "print(input())": Status.PASSED,
    "print(2)": Status.WRONG_ANSWER,
    "1 / 0": Status.RUNTIME_ERROR,
    "while True: print('x' * 10_000)": Status.OUTPUT_LIMIT,
    "while True: pass": Status.TIMEOUT,
}


async def status_of(program: str, seconds: float, reward: CodeReward) -> Status:
    tests = [{"stdin": "1\n", "stdout": "1\n"}]
    row = {"mode": "stdio", "tests": tests, "time_limit_s": seconds}
    verdict = await reward.grade_program(program, parse_task(row))
    assert [one.status for one in verdict.tests] == [verdict.status]
    assert verdict.reward == float(verdict.status is Status.PASSED)
    return verdict.status


@pytest.mark.parametrize(("program", "status"), STATUSES.items(), ids=STATUSES.values())
async def test_each_status(program: str, status: Status, reward: CodeReward) -> None:
    assert await status_of(program, 0.5 if status is Status.TIMEOUT else 60.0, reward) is status


@pytest.mark.slow
async def test_the_status_of_a_program_that_uses_up_the_memory(reward: CodeReward) -> None:
    assert await status_of("x = bytearray(4 << 30)", 60.0, reward) is Status.MEMORY


LARGE = {
    "an int of more digits than Python writes": "def f():\n    return [10**6000]",
    "data nested deeper than Python goes": "def f():\n    a = []\n    for _ in range(900): a = [a]\n    return a",
    "an int that no float holds": "def f():\n    return 10**600",
}


@pytest.mark.parametrize("program", LARGE.values(), ids=LARGE.keys())
async def test_an_answer_that_cannot_be_shown_is_wrong_and_no_fault_of_the_grader(
    program: str, reward: CodeReward
) -> None:
    row = {"mode": "functional", "entry_point": "f", "tests": [{"args": [], "expected": 1.5}]}
    assert (await reward.grade_program(program, parse_task(row))).reward == 0.0
