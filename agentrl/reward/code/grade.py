"""The code reward: a program in a model's answer is run in a sandbox and judged outside it.

```python
async with open_sandbox(SandboxOptions(kind="bubblewrap")) as pool:
    reward = CodeReward(pool)
    verdict = await reward.grade(answer, parse_task(row))      # verdict.status, .reward, .tests
    score = await reward(answer, row)                          # the same as a `Reward`
```

No expected value enters a box in which a candidate runs; what leaves it is output to compare. So an exit code, a
printed marker, an edited file or a patched interpreter is at best a wrong answer. A lost box is no verdict.
"""

from __future__ import annotations

import re
import time

from agentrl.errors import InfrastructureError, SandboxLost
from agentrl.reward.code.boxes import PYTHON, json_lines, run_inside
from agentrl.reward.code.compare import same_output, same_value
from agentrl.reward.code.extract import compiles, defines, extract_code, final_part
from agentrl.reward.code.inside.plain import decode, encode
from agentrl.reward.code.line import Line
from agentrl.reward.code.options import CodeOptions
from agentrl.reward.code.sessions import Session, run_sessions
from agentrl.reward.code.task import Case, Mode, Task, parse_task
from agentrl.reward.code.unit import run_tests
from agentrl.reward.code.verdict import Status, TestResult, Verdict, verdict_of
from agentrl.reward.score import Score
from agentrl.sandbox.types import ExecResult, Sandbox, SandboxPool
from agentrl.types import Row

_JUDGE_SECONDS = 30.0
_SHOWN = 400
_FUTURE = re.compile(r"^from __future__ import [\w, ]+(?:\n|$)", re.MULTILINE)


class CodeReward:
    """Grades programs. Share one a process: its queue is first come, first served, and its boxes are the pool's."""

    def __init__(self, pool: SandboxPool, options: CodeOptions | None = None) -> None:
        self.pool = pool
        self.options = options or CodeOptions()
        self._line = Line(pool, self.options)

    async def __call__(self, answer: str, row: Row) -> Score:
        """Grade an answer to a row (see `task.py` for its forms)."""
        return (await self.grade(answer, parse_task(row))).score()

    async def grade(self, answer: str, task: Task) -> Verdict:
        """Grade a model's answer."""
        program = find_program(answer, task)
        return await self.grade_program(program, task)

    async def grade_program(self, program: str | None, task: Task) -> Verdict:
        """Grade a program as it is. A box that is lost is tried once more, then there is no verdict."""
        if task.empty:
            return Verdict(Status.NO_TESTS, None, detail="the row has no tests")
        if program is None:
            return Verdict(Status.NO_CODE, 0.0, detail="there is no Python program in the answer")
        try:
            return await self._grade(program, task)
        except SandboxLost:
            pass
        except InfrastructureError as error:
            return Verdict(Status.INFRA_ERROR, None, detail=str(error))
        try:
            return await self._grade(program, task)
        except InfrastructureError as error:
            return Verdict(Status.INFRA_ERROR, None, detail=str(error))

    async def _grade(self, program: str, task: Task) -> Verdict:
        if task.mode is Mode.UNIT:
            results, why = await run_tests(self._line, program, task, self._seconds(task), self.options.budget)
            if not results:
                return Verdict(Status.NO_TESTS, None, detail=why)
        elif task.mode is Mode.FUNCTIONAL:
            results = await self._calls(program, task)
        else:
            results = await self._programs(program, task)
        return verdict_of(results, partial=self.options.partial)

    def _seconds(self, task: Task) -> float:
        return task.seconds or self.options.seconds

    def _tolerance(self, task: Task) -> float:
        return self.options.tolerance if task.tolerance is None else task.tolerance

    async def _calls(self, program: str, task: Task) -> list[TestResult]:
        ops = [
            [{"target": task.entry_point, "args": encode(list(case.args)), "kwargs": encode(dict(case.kwargs or {}))}]
            for case in task.cases
        ]
        async with self._line.box() as box:
            sessions = await run_sessions(box, program, ops, self._seconds(task), self.options.budget)
        judged = zip(task.cases, sessions, strict=True)
        return [_judge_call(number, case, one, self._tolerance(task)) for number, (case, one) in enumerate(judged)]

    async def _programs(self, program: str, task: Task) -> list[TestResult]:
        results: list[TestResult] = []
        outputs: list[tuple[int, Case, str]] = []
        async with self._line.box() as box:
            deadline = time.monotonic() + self.options.budget
            await box.write_file("solution.py", program.encode("utf-8", "replace"))
            for number, case in enumerate(task.cases):
                left = deadline - time.monotonic()
                if left <= 0:
                    results.append(TestResult(f"test {number}", Status.TIMEOUT, "the time for all tests is used up"))
                    continue
                ran = await run_program(box, case.stdin, min(self._seconds(task), left))
                status = _ended(ran)
                if status is Status.PASSED and task.judge is not None:
                    outputs.append((number, case, ran.stdout_text))
                elif status is Status.PASSED and not same_output(ran.stdout_text, case.expected, self._tolerance(task)):
                    status = Status.WRONG_ANSWER
                results.append(TestResult(f"test {number}", status, _shown(ran, status)))
        if task.judge is not None and outputs:
            right = await self._ask_judge(task.judge, outputs)
            for (number, _, text), passed in zip(outputs, right, strict=True):
                if not passed:
                    results[number] = TestResult(f"test {number}", Status.WRONG_ANSWER, f"it printed {text[:_SHOWN]!r}")
        return results

    async def _ask_judge(self, judge: str, outputs: list[tuple[int, Case, str]]) -> list[bool]:
        cases = [[case.stdin, text, case.expected] for _, case, text in outputs]
        async with self._line.box() as box:
            ran = await run_inside(box, "special", {"judge": judge, "cases": cases}, _JUDGE_SECONDS)
        lines = json_lines(ran.stdout)
        if not lines or len(lines[0]) != len(cases):
            raise SandboxLost(f"the row's judge gave no verdict (exit code {ran.returncode}): {ran.stderr_text[-500:]}")
        return [verdict is True for verdict in lines[0]]


def find_program(answer: str, task: Task) -> str | None:
    """The program that an answer stands for: its code after the preamble, or the preamble with a body filled in."""
    code = extract_code(answer, task.entry_point)
    if code is not None:
        if not task.preamble or (task.mode is Mode.STDIO and not compiles(task.preamble)):
            return code
        return _after(task.preamble, code)
    if not task.preamble or task.entry_point is None:
        return None
    lines = final_part(answer).split("\n")
    ends = [at for at, line in enumerate(lines) if at and line and not line[0].isspace()]
    body = "\n".join(lines[: ends[0]] if ends else lines)
    filled = task.preamble + body + "\n"
    return filled if body.strip() and compiles(filled) and defines(filled, task.entry_point) else None


def _after(preamble: str, code: str) -> str:
    # `from __future__` must stay first, and a preamble may end in a function that has no body yet.
    if not compiles(preamble):
        return code
    features = _FUTURE.findall(code)
    return "".join(features) + f"{preamble}\n\n{_FUTURE.sub('', code)}"


async def run_program(box: Sandbox, stdin: str, seconds: float, path: str = "solution.py") -> ExecResult:
    """Run a program of the box on this input."""
    return await box.exec([PYTHON, path], stdin=stdin.encode("utf-8", "surrogatepass"), timeout=seconds)


def _ended(ran: ExecResult) -> Status:
    if ran.timed_out:
        return Status.TIMEOUT
    if ran.oom or (ran.returncode and b"MemoryError" in ran.stderr[-200:]):
        return Status.MEMORY
    if ran.truncated:
        return Status.OUTPUT_LIMIT
    return Status.RUNTIME_ERROR if ran.returncode else Status.PASSED


def _shown(ran: ExecResult, status: Status) -> str:
    if status is Status.PASSED:
        return ""
    if status is Status.WRONG_ANSWER:
        return f"it printed {ran.stdout_text[:_SHOWN]!r}"
    return ran.stderr_text[-_SHOWN:].strip() or f"exit code {ran.returncode}"


def _judge_call(number: int, case: Case, session: Session, tolerance: float) -> TestResult:
    name = f"test {number}"
    if not session.answers:
        status = session.status if session.status is not Status.PASSED else Status.RUNTIME_ERROR
        return TestResult(name, status, f"it ended without an answer: {session.end}")
    answer = session.answers[0]
    if "error" in answer:
        error = answer["error"]
        memory = "MemoryError" in error["names"]
        text = str(error.get("trace") or error["text"])[-_SHOWN:]
        return TestResult(name, Status.MEMORY if memory else Status.RUNTIME_ERROR, text)
    try:
        value = decode(answer["value"])
        right = any(same_value(value, one, tolerance) for one in (case.expected, *case.others))
    except (ValueError, RecursionError) as error:
        return TestResult(name, Status.WRONG_ANSWER, f"an answer that is no data: {error}"[:_SHOWN])
    shown = "" if right else f"it gave {_repr(value):.{_SHOWN}}"
    return TestResult(name, Status.PASSED if right else Status.WRONG_ANSWER, shown)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python writes, or data nested too deep
        return f"a {type(value).__name__} too large to be written"
