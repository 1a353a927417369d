"""Unmodified clients and agent frameworks, each in an environment of its own, against one scripted policy."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
VENVS = HERE.parents[1] / ".cache" / "venvs"
REQUIREMENTS = {
    "openai2": ("openai[aiohttp]==2.54.0",),
    "frameworks": ("openai-agents==0.24.0", "langgraph==1.2.24", "langchain-openai==1.7.4"),
}


def interpreter(name: str) -> Path:
    """The Python of an environment with these requirements, made once."""
    folder = VENVS / name
    python, done = folder / "bin" / "python", folder / "done"
    wanted = "\n".join(REQUIREMENTS[name])
    if not done.is_file() or done.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        command: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            *REQUIREMENTS[name],
        ]
        subprocess.run(command, check=True, timeout=600)
        done.write_text(wanted)
    return python


def call(expression: str, thought: str = "") -> str:
    body = f'{{"name": "calc", "arguments": {{"expression": "{expression}"}}}}'
    return f"{thought}<tool_call>\n{body}\n</tool_call><|im_end|>"


EPISODE = [call("2+3", "<think>\nfirst\n</think>\n\n"), call("5+1"), "5 and 6<|im_end|>", call("1+1"), "2<|im_end|>"]


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("script", "environment"),
    [
        ("openai_client.py", None),
        ("openai_client.py", "openai2"),
        ("openai_agents.py", "frameworks"),
        ("langgraph_agent.py", "frameworks"),
    ],
)
async def test_an_episode_of_an_unmodified_agent_is_recorded(
    setup: Callable[..., Any], script: str, environment: str | None
) -> None:
    python = Path(sys.executable) if environment is None else await asyncio.to_thread(interpreter, environment)
    s = setup(EPISODE, token_delay=0.001)
    await s.endpoint.start()
    session = s.open()
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "LANGSMITH_"))}
    process = await asyncio.create_subprocess_exec(
        python,
        HERE / "clients" / script,
        session.base_url,
        session.api_key,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=plain,
    )
    async with asyncio.timeout(600):
        said, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    assert said.decode().splitlines()[-1] == "5 and 6 / 2"
    if environment == "openai2":
        assert said.decode().startswith("2.")
    trajectories = await session.close()
    assert len(trajectories) == 1, [t.reason for t in trajectories]
    sampled = s.template.decode(trajectories[0].tokens[trajectories[0].loss_mask])
    assert sampled == "".join(EPISODE), "what is trained is what was sampled, thought included"
    await s.endpoint.stop()
