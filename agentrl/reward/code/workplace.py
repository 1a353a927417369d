"""Where a coding episode works: a box of its own, taken when it is first needed, and the tools for its files."""

from __future__ import annotations

from contextlib import AsyncExitStack

from agentrl.reward.code.bench import Bench, shared_bench
from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.options import CodeOptions
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.types import ExecResult, Sandbox
from agentrl.tool import tool

_SHOWN = 2000


class Workplace:
    """The tools `write_file`, `read_file` and `run` on one box; a command has `seconds`. Grading takes other boxes."""

    def __init__(self, sandbox: SandboxOptions, grading: CodeOptions, seconds: float) -> None:
        self._sandbox, self._grading, self._seconds = sandbox, grading, seconds
        self.tools = (self.write_file, self.read_file, self.run)
        self._open = AsyncExitStack()
        self._bench: Bench | None = None
        self._box: Sandbox | None = None

    async def open(self) -> None:
        """An empty workplace, as at first. Raises ConfigError where this machine cannot offer the kind of sandbox."""
        await self.close()
        self._open = AsyncExitStack()
        self._bench = await self._open.enter_async_context(shared_bench(self._sandbox))

    async def close(self) -> None:
        """Give the box back; safe to repeat."""
        self._bench = self._box = None
        await self._open.aclose()

    async def box(self) -> Sandbox:
        """The episode's box."""
        assert self._bench is not None, "a workplace is opened first"
        if self._box is None:
            self._box = await self._open.enter_async_context(self._bench.boxes.box())
        return self._box

    def grader(self) -> CodeReward:
        """A grader on boxes that are not the episode's."""
        assert self._bench is not None, "a workplace is opened first"
        return self._bench.reward(self._grading)

    @tool
    async def write_file(self, path: str, content: str) -> str:
        """Write a file in the working directory.

        Args:
            path: for example solution.py
            content: all of the file's text
        """
        await (await self.box()).write_file(path, content.encode("utf-8", "replace"))
        return "ok"

    @tool
    async def read_file(self, path: str) -> str:
        """Read a file.

        Args:
            path: for example solution.py
        """
        return _cut((await (await self.box()).read_file(path)).decode("utf-8", "replace"))

    @tool(timeout=600)
    async def run(self, command: str, stdin: str = "") -> str:
        """Run a shell command in the working directory and see what it prints.

        Args:
            command: for example python3 solution.py
            stdin: what the program reads from standard input
        """
        box = await self.box()
        return _report(
            await box.exec(["sh", "-c", command], stdin=stdin.encode("utf-8", "replace"), timeout=self._seconds),
            self._seconds,
        )


def _report(ran: ExecResult, seconds: float) -> str:
    ending = f"exit code {ran.returncode}"
    if ran.timed_out:
        ending = f"killed after {seconds:g} s"
    elif ran.oom:
        ending = "killed for memory"
    elif ran.truncated:
        ending = "killed for too much output"
    return f"{_cut(ran.stdout_text)}{_cut(ran.stderr_text)}[{ending}]"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}\n…\n{text[-_SHOWN // 2 :]}"
