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

import random
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError, SandboxLost
from agentrl.reward.code.bench import Bench, shared_bench
from agentrl.reward.code.grade import CodeReward, find_program
from agentrl.reward.code.options import CodeOptions
from agentrl.reward.code.task import Case, Mode, Task, parse_task
from agentrl.reward.code.verdict import Status, Verdict
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.types import ExecResult, Sandbox
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Row, Step

SOLUTION = "solution.py"
SIZES = {"train": 20_000, "eval": 256}
_SHOWN = 2000


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
        self.shown = _public(self.task, row, public)
        kind = {"kind": sandbox} if isinstance(sandbox, str) else dict(sandbox)
        self.sandbox = SandboxOptions.model_validate(kind)
        self.grading = CodeOptions.model_validate(dict(grading or {}))
        self.tries, self.discount, self.instruction = tries, discount, instruction
        self.failed = 0
        self.tools = (self.write_file, self.read_file, self.run, self.submit) if use_tools else ()
        self.over = True
        self._final: str | None = None
        self._open = AsyncExitStack()
        self._bench: Bench | None = None
        self._box: Sandbox | None = None

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """Simple programs, `n * 3 + 4` and the like; no expression is in both splits."""
        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        return sample_rows(split, seed)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The question; nothing is random. Boxes start when they are first needed."""
        await self.close()
        self._open = AsyncExitStack()
        self._bench = await self._open.enter_async_context(shared_bench(self.sandbox))
        self.failed, self.over, self._final = 0, False, None
        question = str(self.row.get("question") or self.row.get("question_content") or self.row.get("prompt") or "")
        return [{"role": "user", "content": f"{question}\n{self.instruction}".strip()}], {}

    async def step(self, action: Message) -> Step:
        """Run the calls, or take the program in the answer as a submission."""
        if self.over or self._bench is None:
            raise ContractError("the episode is over; call reset first")
        if action.get("tool_calls"):
            messages = await run_tools(self.tools, action)
        else:
            program = find_program(action.get("content") or "", self.task)
            text = await self._submission(program)
            messages = [{"role": "user", "content": text}]
        if self._final is None:
            return Step(messages, 0.0, False, False, {})
        self.over = True
        verdict = await self._grader().grade_program(self._final or None, self.task)
        _checked(verdict)
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
        """The row's `solution`, or the program that a sample row asks for; other rows have none."""
        if self.row.get("solution"):
            return str(self.row["solution"])
        told = self.row.get("expression")
        return f"```python\nn = int(input())\nprint({told})\n```" if told else None

    async def close(self) -> None:
        """Give the box back."""
        self._bench = self._box = None
        await self._open.aclose()

    @tool
    async def write_file(self, path: str, content: str) -> str:
        """Write a file in the working directory.

        Args:
            path: for example solution.py
            content: all of the file's text
        """
        await (await self._workplace()).write_file(path, content.encode("utf-8", "replace"))
        return "ok"

    @tool
    async def read_file(self, path: str) -> str:
        """Read a file.

        Args:
            path: for example solution.py
        """
        return _cut((await (await self._workplace()).read_file(path)).decode("utf-8", "replace"))

    @tool(timeout=600)
    async def run(self, command: str, stdin: str = "") -> str:
        """Run a shell command in the working directory and see what it prints.

        Args:
            command: for example python3 solution.py
            stdin: what the program reads from standard input
        """
        box = await self._workplace()
        seconds = self.task.seconds or self.grading.seconds
        return _report(await box.exec(["sh", "-c", command], stdin=stdin.encode(), timeout=seconds), seconds)

    @tool(timeout=1200)
    async def submit(self) -> str:
        """Hand in solution.py. The public tests are run first, and a failure is told while there are tries left."""
        try:
            source = await (await self._workplace()).read_file(SOLUTION)
        except OSError:
            return f"error: there is no {SOLUTION}; write it first"
        # As it is: a file that is no program fails its tests, it is not searched for one.
        return await self._submission(source.decode("utf-8", "replace"))

    async def _submission(self, program: str | None) -> str:
        if program is not None and self.shown is not None:
            verdict = _checked(await self._grader().grade_program(program, self.shown))
            text = "" if verdict.reward is None or verdict.status is Status.PASSED else _feedback(verdict, self.shown)
        else:
            text = "" if program is not None else "There is no Python program in the answer."
        if text and self.failed + 1 < self.tries:
            self.failed += 1
            return f"{text} Try again."
        self._final = program or ""
        return "submitted"

    def _grader(self) -> CodeReward:
        assert self._bench is not None, "reset comes before step"
        return self._bench.reward(self.grading)

    async def _workplace(self) -> Sandbox:
        assert self._bench is not None, "reset comes before step"
        if self._box is None:
            self._box = await self._open.enter_async_context(self._bench.boxes.box())
        return self._box


def sample_rows(split: str, seed: int) -> Iterator[Row]:
    """`n * a + b` and its like; every eighth pair of numbers is for evaluation."""
    rng = random.Random(f"{split} {seed}")
    made = 0
    while made < SIZES[split]:
        a, b = rng.randint(2, 9), rng.randint(1, 9)
        if ((a * 31 + b) % 8 == 0) != (split == "eval"):
            continue
        made += 1
        first, second = rng.choice("+-*"), rng.choice("+-*")
        expression = f"n {first} {a} {second} {b}"
        tests = [
            {"stdin": f"{n}\n", "stdout": f"{_value(n, first, a, second, b)}\n"} for n in rng.sample(range(2, 40), 3)
        ]
        yield {"question": f"Read n, print {expression}", "expression": expression, "mode": "stdio", "tests": tests}


def _value(n: int, first: str, a: int, second: str, b: int) -> int:
    act = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    if second == "*" and first != "*":
        return act[first](n, a * b)
    return act[second](act[first](n, a), b)


def _public(task: Task, row: Row, count: int) -> Task | None:
    if task.mode is Mode.UNIT:
        text = row.get("public_test")
        return replace(task, test=text) if text else None
    own = row.get("public_tests")
    cases = parse_task({**row, "tests": own}).cases if own is not None else task.cases[:count]
    return replace(task, cases=cases) if cases else None


def _checked(verdict: Verdict) -> Verdict:
    if verdict.status is Status.INFRA_ERROR:
        raise SandboxLost(f"an answer could not be graded: {verdict.detail}")
    return verdict


def _feedback(verdict: Verdict, task: Task) -> str:
    number, failed = next((n, t) for n, t in enumerate(verdict.tests) if t.status is not Status.PASSED)
    if number >= len(task.cases):
        return f"{failed.name}: {failed.status}: {failed.detail}."
    return f"{_asked(task.cases[number], task)}, {failed.detail or failed.status}."


def _asked(case: Case, task: Task) -> str:
    if task.mode is Mode.STDIO:
        return f"Input {case.stdin!r}: expected {str(case.expected).rstrip()!r}"
    return f"{task.entry_point}{case.args!r}: expected {case.expected!r}"


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
