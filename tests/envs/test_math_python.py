"""Math with Python in a box."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.envs.math_python import MathPython
from agentrl.types import Message

KIND = "bubblewrap" if shutil.which("bwrap") and shutil.which("busybox") else "subprocess"


def calls(program: str) -> Message:
    function = {"name": "python", "arguments": json.dumps({"program": program})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@asynccontextmanager
async def playing(seconds: float) -> AsyncIterator[MathPython]:
    row = {"question": "What is 2 to the power of 100?", "answer": str(2**100)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sandbox kind 'subprocess'")
        env = MathPython(row, sandbox={"kind": KIND, "slots": 1}, seconds=seconds)
        await env.reset()
    try:
        yield env
    finally:
        await env.close()


async def test_it_computes_and_answers() -> None:
    async with playing(60.0) as env:
        step = await env.step(calls("print(2**100)"))
        assert step.observation[0]["content"] == str(2**100)
        assert "ZeroDivisionError" in (await env.step(calls("1/0"))).observation[0]["content"]
        step = await env.step({"role": "assistant", "content": f"\\boxed{{{2**100}}}"})
        assert (step.reward, step.terminated) == (1.0, True)


async def test_a_program_without_end_is_told() -> None:
    async with playing(0.5) as env:
        assert "did not end within 0.5 s" in (await env.step(calls("while True: pass"))).observation[0]["content"]
