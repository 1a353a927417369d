"""A box under the names that users of hosted sandboxes know: `commands.run`, `files.read`, `files.write`.

box = E2BStyle(sandbox)
done = await box.commands.run("python3 main.py | head -3")
done.stdout, done.exit_code
await box.files.write("notes.txt", "text")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agentrl.sandbox.types import Sandbox


class CommandResult(NamedTuple):
    """A finished command, as text; bytes that are no UTF-8 become U+FFFD."""

    stdout: str
    stderr: str
    exit_code: int
    error: str | None
    """Why a limit ended it: "timeout", "out of memory" or "too much output"; None where it ended by itself."""


class Commands:
    """Shell commands in the box."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(
        self, cmd: str, *, envs: Mapping[str, str] | None = None, cwd: str | None = None, timeout: float = 60.0
    ) -> CommandResult:
        """Run `cmd` with /bin/sh. A failing command is a result, not an exception."""
        done = await self._sandbox.exec(["/bin/sh", "-c", cmd], cwd=cwd, env=envs, timeout=timeout)
        reasons = [(done.timed_out, "timeout"), (done.oom, "out of memory"), (done.truncated, "too much output")]
        error = next((reason for hit, reason in reasons if hit), None)
        return CommandResult(done.stdout_text, done.stderr_text, done.returncode, error)


class Files:
    """Files in the box."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def read(self, path: str) -> str:
        """A file as text; bytes that are no UTF-8 become U+FFFD."""
        return (await self._sandbox.read_file(path)).decode("utf-8", "replace")

    async def write(self, path: str, data: str | bytes) -> None:
        """Write a file, making its folders."""
        await self._sandbox.write_file(path, data.encode() if isinstance(data, str) else data)


class E2BStyle:
    """See the module's docstring. The box stays the caller's; `kill` closes it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.commands = Commands(sandbox)
        self.files = Files(sandbox)
        self._sandbox = sandbox

    async def kill(self) -> None:
        """Remove the box."""
        await self._sandbox.close()
