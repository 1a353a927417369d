"""The coding environment and its agent, on real boxes."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.agents.coder import Coder
from agentrl.envs.code import Code
from agentrl.errors import ContractError, SandboxLost
from agentrl.types import Message, Row
from examples.benchmark_rows import human_eval

KIND = "bubblewrap" if shutil.which("bwrap") and shutil.which("busybox") else "subprocess"
ROW: Row = {
    "question": "Read n, print n * 3 + 4",
    "mode": "stdio",
    "tests": [{"stdin": "2\n", "stdout": "10\n"}, {"stdin": "5\n", "stdout": "19\n"}],
}
PATIENT = {"seconds": 60.0, "budget": 600.0}  # how fast programs are is the machine's business
RIGHT, WRONG, SPECIAL = "print(int(input()) * 3 + 4)", "print(int(input()) * 3)", "input()\nprint(10)"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sandbox kind 'subprocess'")
        yield


@asynccontextmanager
async def playing(row: Row = ROW, **settings: Any) -> AsyncIterator[Code]:
    grading = {**PATIENT, **settings.pop("grading", {})}
    env = Code(row, sandbox={"kind": KIND, "slots": 1}, grading=grading, **settings)
    await env.reset(seed=0)
    try:
        yield env
    finally:
        await env.close()


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


async def test_a_right_answer() -> None:
    async with playing() as env:
        step = await env.step(says(RIGHT))
        assert (step.reward, step.terminated, step.observation) == (1.0, True, [])
        assert step.info["status"] == "passed"
        with pytest.raises(ContractError, match="over"):
            await env.step(says(RIGHT))


async def test_a_failure_of_a_public_test_is_told_and_may_be_mended_for_less() -> None:
    async with playing(discount=0.5) as env:
        step = await env.step(says(WRONG))
        assert (step.reward, step.terminated) == (0.0, False)
        assert "'2\\n': expected '10'" in step.observation[0]["content"]
        assert "'6\\n'" in step.observation[0]["content"]
        assert "19" not in step.observation[0]["content"]
        step = await env.step(says("no program"))
        assert "no Python program" in step.observation[0]["content"]
        step = await env.step(says(RIGHT))
        assert (step.reward, step.terminated, step.info["tries"]) == (0.25, True, 3)


async def test_hidden_tests_decide() -> None:
    async with playing() as env:
        step = await env.step(says(SPECIAL))
        assert (step.reward, step.terminated, step.info["status"]) == (0.0, True, "wrong_answer")


async def test_the_last_try_ends_it() -> None:
    async with playing(tries=1) as env:
        step = await env.step(says("sorry"))
        assert (step.reward, step.terminated, step.info["status"]) == (0.0, True, "no_code")


async def test_tools_write_run_read_and_submit() -> None:
    async with playing() as env:
        step = await env.step(calls("submit"))
        assert "there is no solution.py" in step.observation[0]["content"]
        await env.step(calls("write_file", path="solution.py", content=WRONG))
        step = await env.step(calls("run", command="python3 solution.py", stdin="7"))
        assert step.observation[0]["content"] == "21\n[exit code 0]"
        step = await env.step(calls("run", command="cat nothing; exit 3"))
        assert step.observation[0]["content"].endswith("[exit code 3]")
        step = await env.step(calls("read_file", path="solution.py"))
        assert step.observation[0]["content"] == WRONG
        step = await env.step(calls("submit"))
        assert "expected '10'" in step.observation[0]["content"]
        await env.step(calls("write_file", path="solution.py", content=RIGHT))
        step = await env.step(calls("submit"))
        assert (step.reward, step.terminated) == (0.8, True)
        assert step.observation[0]["content"] == "submitted"


async def test_grading_does_not_wait_for_the_box_that_the_episode_holds() -> None:
    async with playing(grading={"queue_seconds": 60.0}) as env, playing(grading={"queue_seconds": 60.0}) as other:
        await env.step(calls("write_file", path="x", content="y"))
        assert (await other.step(says(RIGHT))).reward == 1.0
        assert (await env.step(says(RIGHT))).reward == 1.0


async def test_a_box_that_is_lost_is_nobodys_failure() -> None:
    async with playing(grading={"most_waiting": 1}) as env:
        await env.place.grader().pool.close()
        with pytest.raises(SandboxLost):
            await env.step(says(RIGHT))


async def test_unit_rows_show_their_public_test() -> None:
    row = {
        "question": "Write add(a, b).",
        "mode": "unit",
        "test": "from solution import add\ndef test_all():\n    assert add(2, 3) == 5\n    assert add(2, 2) == 4\n",
        "public_test": "from solution import add\ndef test_one():\n    assert add(2, 2) == 4\n",
    }
    async with playing(row) as env:
        step = await env.step(says("```python\ndef add(a, b):\n    return a - b\n```"))
        assert "assert add(2, 2) == 4" in step.observation[0]["content"]
        assert "add(2, 3)" not in step.observation[0]["content"]
        step = await env.step(says("```python\ndef add(a, b):\n    return a + b\n```"))
        assert (step.reward, step.terminated) == (0.8, True)


async def test_sample_rows_are_solved_by_their_own_expression() -> None:
    train = [row for row, _ in zip(Code.rows("train", 0), range(50), strict=False)]
    held = [row for row, _ in zip(Code.rows("eval", 0), range(50), strict=False)]
    assert not {row["expression"] for row in train} & {row["expression"] for row in held}
    for row in train[:3]:
        async with playing(row) as env:
            assert (await env.step(says(f"n = int(input())\nprint({row['expression']})"))).reward == 1.0


async def test_humanevals_rows_are_solved_by_their_own_solution() -> None:
    for row in [row for row, _ in zip(human_eval(), range(1), strict=False)]:
        async with playing(row, use_tools=False) as env:
            wrong = await env.step(says(f"```python\n{row['prompt']}    return None\n```"))
            assert (wrong.reward, wrong.terminated, wrong.info["status"]) == (0.0, True, "wrong_answer")
            messages, _ = await env.reset(seed=0)
            answer = env.oracle(messages)
            assert answer is not None
            assert (await env.step(says(answer))).reward == 1.0


async def test_the_agent_shortens_old_outputs() -> None:
    agent = Coder((), keep=2, short=5)
    seen: list[list[Message]] = []

    class Client:
        @property
        def chat(self) -> Client:
            return self

        @property
        def completions(self) -> Client:
            return self

        async def create(self, *, messages: list[Message], **settings: Any) -> Any:
            from openai.types.chat import ChatCompletion

            seen.append(list(messages))
            message = {"role": "assistant", "content": "ok"}
            return ChatCompletion.model_validate(
                {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "m",
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                }
            )

    long = {"role": "tool", "tool_call_id": "1", "content": "0123456789"}
    await agent.act([long], Client())
    await agent.act([long], Client())
    assert [m["role"] for m in seen[1]] == ["system", "tool", "assistant", "tool"]
    assert (seen[1][1]["content"], seen[1][3]["content"]) == ("01234 …", "0123456789")
