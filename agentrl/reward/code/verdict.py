"""What a grading gives back."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from agentrl.reward.score import Score


class Status(enum.StrEnum):
    """How it went; of an answer: of its first test that failed."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    """It raised, left, was killed, or gave something that is not data."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    NO_CODE = "no_code"
    """There is no program in the answer."""
    NO_TESTS = "no_tests"
    """The row has nothing to grade by, or nothing that asks the program: no verdict."""
    INFRA_ERROR = "infra_error"
    """No box could be had, or it was lost: no verdict."""


NO_VERDICT = frozenset({Status.NO_TESTS, Status.INFRA_ERROR})


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test. `detail` is for people and models: an exception, or what was printed."""

    __test__ = False

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one answer. `reward` is None where there is no verdict, never 0 for somebody else's fault."""

    status: Status
    reward: float | None
    tests: tuple[TestResult, ...] = ()
    detail: str = ""

    @property
    def passed(self) -> int:
        """Tests that passed."""
        return sum(test.status is Status.PASSED for test in self.tests)

    @property
    def total(self) -> int:
        """Tests that were run, or would have been."""
        return len(self.tests)

    def score(self) -> Score:
        """The same for a reward."""
        share = {"tests_passed": self.passed / self.total} if self.total else {}
        return Score(self.reward, share, {"status": str(self.status), "detail": self.detail})


def verdict_of(tests: list[TestResult], *, partial: bool) -> Verdict:
    """Full or partial credit for these results; at least one."""
    failed = next((test for test in tests if test.status is not Status.PASSED), None)
    if failed is None:
        return Verdict(Status.PASSED, 1.0, tuple(tests))
    share = sum(test.status is Status.PASSED for test in tests) / len(tests)
    return Verdict(failed.status, share if partial else 0.0, tuple(tests), failed.detail)
