r"""Math problems, with Python in a sandbox to compute with: the last `\boxed{…}` is compared with the row's answer.

    user       What is the 20th prime? End with your answer in \boxed{}.
    assistant  python("…")
    tool       71
    assistant  \boxed{71}                                                          1.0

Rows are those of `math_single`. Each call is a program of its own in the episode's box, whose files stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from agentrl.env import Env
from agentrl.envs.math_single import INSTRUCTION, MathSingle
from agentrl.errors import ContractError
from agentrl.reward.code.bench import Bench, shared_bench
from agentrl.reward.extract import gold_text
from agentrl.reward.math import MathReward
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.types import Sandbox
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Row, Step

_SHOWN = 2000


class MathPython(Env):
    """`seconds` limit each call; calls cost nothing. `sandbox` is a kind or a table of `SandboxOptions`."""

    rows = MathSingle.rows
    reward_range = (0.0, 1.0)

    def __init__(
        self, row: Row, *, sandbox: str | Mapping[str, Any] = "bubblewrap", seconds: float = 5.0, reminder: bool = True
    ) -> None:
        super().__init__(row)
        self.sandbox = SandboxOptions.model_validate({"kind": sandbox} if isinstance(sandbox, str) else dict(sandbox))
        self.seconds, self.reminder = seconds, reminder
        self.reward = MathReward()
        self.tools = (self.python,)
        self.over = True
        self._open = AsyncExitStack()
        self._bench: Bench | None = None
        self._box: Sandbox | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The question; nothing is random. The box starts with the first call."""
        await self.close()
        self._open = AsyncExitStack()
        self._bench = await self._open.enter_async_context(shared_bench(self.sandbox))
        self.over = False
        hint = "\nYou may compute with the tool python." if self.reminder else ""
        return [{"role": "user", "content": f"{self.row['question']}\n{INSTRUCTION}{hint}"}], {}

    async def step(self, action: Message) -> Step:
        """Run the calls, or judge the answer."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        if action.get("tool_calls"):
            return Step(await run_tools(self.tools, action), 0.0, False, False, {})
        self.over = True
        found = await self.reward(action.get("content") or "", self.row)
        return Step([], found.value, True, False, {"reward_parts": dict(found.parts), **found.info})

    def oracle(self, messages: list[Message]) -> str:
        """The gold answer, without a call."""
        return f"\\boxed{{{gold_text(str(self.row['answer']))}}}"

    async def close(self) -> None:
        """Give the box back."""
        self._bench = self._box = None
        await self._open.aclose()

    @tool(timeout=600)
    async def python(self, program: str) -> str:
        """Run a Python program and see what it prints.

        Args:
            program: all of it; print what you want to know
        """
        assert self._bench is not None, "reset comes before step"
        if self._box is None:
            self._box = await self._open.enter_async_context(self._bench.boxes.box())
        ran = await self._box.exec(["python3", "-c", program], timeout=self.seconds)
        if ran.timed_out:
            return f"error: it did not end within {self.seconds:g} s"
        text = ran.stdout_text + (ran.stderr_text[-500:] if ran.returncode else "")
        return text[:_SHOWN].rstrip() or f"(nothing printed, exit code {ran.returncode})"
