"""Somebody else's agent, whatever it is made of: it is given a data row, an OpenAI base URL and a key, and plays.

    async def run(row, base_url, api_key):           # in this process; any framework that takes a base URL
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return 1.0                                   # what it earned, or None: the environment judges `answer`

or a `command`, in any language: the row comes as JSON on its standard input, `OPENAI_BASE_URL` and `OPENAI_API_KEY` in
its environment, and the last line that it prints is the reward, or JSON `{"reward": …, "answer": …}`.

Use it with `agentrl.envs.black_box:BlackBox`, or with any environment whose first message is JSON of the row. All of
its model calls are one turn: they are trained by what the whole of it earned. A new history is a new trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from agentrl.agent import Agent, ChatClient
from agentrl.config import resolve_object
from agentrl.errors import ConfigError, ContractError
from agentrl.tool import Tool
from agentrl.types import Message

_TAIL = 500


@runtime_checkable
class Served(Protocol):
    """A client that can also be reached over HTTP: our sessions and `openai.AsyncOpenAI` can."""

    @property
    def base_url(self) -> Any:
        """For `OpenAI(base_url=…)`."""
        ...

    @property
    def api_key(self) -> str:
        """The key that goes with it."""
        ...


class BlackBox(Agent):
    """`run` is a function or the dotted path of one, `command` a program with its arguments; one of the two."""

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        run: Callable[..., Any] | str | None = None,
        command: Sequence[str] = (),
        cwd: str | None = None,
    ) -> None:
        super().__init__(tools)
        if (run is None) == (not command):
            raise ConfigError("a black box has either run, a function, or command, a program")
        if cwd is not None and not command:
            raise ConfigError("cwd has no effect without command")
        self.run = resolve_object(run) if isinstance(run, str) else run
        if self.run is not None and not callable(self.run):
            raise ConfigError(f"run = {run!r} is a {type(self.run).__name__}, not a function")
        self.command, self.cwd = list(command), cwd

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """Let it play; what it says of itself is the action."""
        if not isinstance(client, Served):
            raise ContractError("a black box needs a session that is served over HTTP; this one is not")
        row = json.loads(observation[0]["content"])
        base_url, api_key = str(client.base_url), client.api_key
        if self.run is None:
            said = await self._command(row, base_url, api_key)
        elif inspect.iscoroutinefunction(self.run):
            said = await self.run(row, base_url, api_key)
        else:
            said = await asyncio.to_thread(self.run, row, base_url, api_key)
        return {"role": "assistant", "content": json.dumps(said if isinstance(said, dict) else {"reward": said})}

    async def _command(self, row: Any, base_url: str, api_key: str) -> Any:
        env = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        pipe = asyncio.subprocess.PIPE
        # A start that is cancelled half-way would wait for the output of all that the program has started by then.
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *self.command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=self.cwd, start_new_session=True
            )
        )
        try:
            process = await asyncio.shield(starting)
            out, err = await process.communicate(json.dumps(row).encode() + b"\n")
        finally:
            await _end(starting)
        lines = out.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        tail = err.decode(errors="replace")[-_TAIL:].strip()
        if process.returncode:
            raise RuntimeError(f"{self.command[0]} ended with code {process.returncode}: {tail or last[-_TAIL:]}")
        try:
            return json.loads(last)
        except json.JSONDecodeError as error:
            raise ContractError(
                f"the last line that {self.command[0]} printed must be its reward, a number or null, or JSON with one; "
                f"it was {last[-_TAIL:]!r}"
            ) from error


async def _end(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Whatever it started is of its process group, and goes with it: also when the episode's time is up."""
    try:
        process = await starting
    except OSError:
        return  # there is no such program
    _kill_group(process.pid)
    # Not `wait`, which also waits for whoever left the group and holds the output.
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    process._transport.close()  # type: ignore[attr-defined]


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
