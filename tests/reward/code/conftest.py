"""A grader over real boxes: bubblewrap where this machine has it, else plain processes (the programs here are ours)."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.options import CodeOptions
from agentrl.sandbox import SandboxOptions, open_sandbox
from agentrl.sandbox.pool import Pool

PATIENT = CodeOptions(seconds=60.0, budget=600.0)
"""For programs that end by themselves: how fast is the machine's business. Endless ones have limits of their own."""
KIND = "bubblewrap" if shutil.which("bwrap") and shutil.which("busybox") else "subprocess"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Pool]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sandbox kind 'subprocess'")
        boxes = open_sandbox(SandboxOptions(kind=KIND, slots=2))
    async with boxes:
        yield boxes


@pytest.fixture
def reward(pool: Pool) -> CodeReward:
    return CodeReward(pool, PATIENT)
