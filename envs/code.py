"""Programming tasks in a sandbox: write a program, see the public tests fail, mend it; hidden tests decide.

    user       Write a Python program that reads n and prints n * 3 + 4.
    assistant  ```python … print(n * 3) …```          or write_file(…), run("python3 solution.py"), submit()
    user       Input '2\\n': expected '10', it printed '6\\n'. Try again.
    assistant  ```python … print(n * 3 + 4) …```                                     0.5

Rows are those of `agentrl.reward.code.task`, with a `question` (HumanEval: its `prompt`). The first `public` tests are
shown when they fail, or those in the row's own `public_tests` (`public_test` for test files). All tests decide, and are
judged in other boxes than the one the episode works in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError, SandboxLost
from agentrl.reward.code.grade import find_program
from agentrl.reward.code.options import CodeOptions
from agentrl.reward.code.public import public_task, told
from agentrl.reward.code.samples import sample_rows
from agentrl.reward.code.task import Task, parse_task
from agentrl.reward.code.verdict import Status, Verdict
from agentrl.reward.code.workplace import Workplace
from agentrl.sandbox.options import SandboxOptions
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Row, Step

SOLUTION = "solution.py"


class Code(Env):
    """`tries` submissions; one that fails a public test is told so, and each such failure multiplies the reward by
    `discount`. `sandbox` is a kind or a table of `SandboxOptions`, `grading` one of `CodeOptions`."""

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        row: Row,
        *,
        sandbox: str | Mapping[str, Any] = "bubblewrap",
        grading: Mapping[str, Any] | None = None,
        tries: int = 3,
        discount: float = 0.8,
        public: int = 1,
        use_tools: bool = True,
        instruction: str = "",
    ) -> None:
        if tries < 1 or not 0 <= discount <= 1 or public < 0:
            raise ContractError(
                f"tries = {tries} must be >= 1, discount = {discount} from 0 to 1, public = {public} >= 0"
            )
        super().__init__(row)
        self.task = parse_task(row)
        self.shown = public_task(self.task, row, public)
        options = CodeOptions.model_validate(dict(grading or {}))
        kind = SandboxOptions.model_validate({"kind": sandbox} if isinstance(sandbox, str) else dict(sandbox))
        self.place = Workplace(kind, options, self.task.seconds or options.seconds)
        self.tools = (*self.place.tools, self.submit) if use_tools else ()
        self.tries, self.discount, self.instruction = tries, discount, instruction
        self.failed, self.over = 0, True
        self._final: str | None = None

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """Simple programs, `n * 3 + 4` and the like; no expression is in both splits."""
        return sample_rows(split, seed)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The question; nothing is random. Boxes start when they are first needed."""
        await self.place.open()
        self.failed, self.over, self._final = 0, False, None
        question = str(self.row.get("question") or self.row.get("question_content") or self.row.get("prompt") or "")
        return [{"role": "user", "content": f"{question}\n{self.instruction}".strip()}], {}

    async def step(self, action: Message) -> Step:
        """Run the calls, or take the program in the answer as a submission."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        if action.get("tool_calls"):
            messages = await run_tools(self.tools, action)
        else:
            text = await self._submission(find_program(action.get("content") or "", self.task))
            messages = [{"role": "user", "content": text}]
        if self._final is None:
            return Step(messages, 0.0, False, False, {})
        self.over = True
        verdict = await self._graded(self._final or None, self.task)
        reward = None if verdict.reward is None else verdict.reward * self.discount**self.failed
        parts = {f"code_{verdict.status}": 1.0, **verdict.score().parts}
        info = {
            "status": str(verdict.status),
            "detail": verdict.detail,
            "tries": self.failed + 1,
            "reward_parts": parts,
        }
        # An answer without calls is owed no reply.
        return Step(messages if action.get("tool_calls") else [], reward, True, False, info)

    def oracle(self, messages: list[Message]) -> str | None:
        """The row's `solution`, HumanEval's own, or the program that a sample row asks for; other rows have none."""
        row = self.row
        if row.get("solution"):
            return str(row["solution"])
        if row.get("canonical_solution"):
            return f"```python\n{row.get('prompt', '')}{row['canonical_solution']}```"
        wanted = row.get("expression")
        return f"```python\nn = int(input())\nprint({wanted})\n```" if wanted else None

    async def close(self) -> None:
        """Give the box back."""
        self.over = True
        await self.place.close()

    @tool(timeout=1200)
    async def submit(self) -> str:
        """Hand in solution.py. The public tests are run first, and a failure is told while there are tries left."""
        try:
            source = await (await self.place.box()).read_file(SOLUTION)
        except OSError:
            return f"error: there is no {SOLUTION}; write it first"
        # As it is: a file that is no program fails its tests, it is not searched for one.
        return await self._submission(source.decode("utf-8", "replace"))

    async def _submission(self, program: str | None) -> str:
        if program is not None and self.shown is not None:
            text = told(await self._graded(program, self.shown), self.shown)
        else:
            text = "" if program is not None else "There is no Python program in the answer."
        if text and self.failed + 1 < self.tries:
            self.failed += 1
            return f"{text} Try again."
        self._final = program or ""
        return "submitted"

    async def _graded(self, program: str | None, task: Task) -> Verdict:
        verdict = await self.place.grader().grade_program(program, task)
        if verdict.status is Status.INFRA_ERROR:
            raise SandboxLost(f"an answer could not be graded: {verdict.detail}")
        return verdict
