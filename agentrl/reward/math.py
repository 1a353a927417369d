"""Whether a completion's final answer is the gold answer. docs/rewards.md has the rules.

The comparison itself runs in a worker process: it can be stopped at any moment, from any thread or loop.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError, DeadlineExceeded
from agentrl.reward.extract import answer_text, gold_text
from agentrl.reward.options import MathOptions
from agentrl.reward.score import Score
from agentrl.reward.workers import WorkerLost, WorkerPool, shared_pool
from agentrl.types import Row

CHECK = "agentrl.reward.symbolic.check:check"
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`correct` None is "no verdict": the gold cannot be read, and nobody can be right or wrong.

    `reason` is "equal", "different", "no_answer", "answer_unparseable", "time_limit", "worker_lost" or
    "gold_unparseable"; `detail` says more for a person. `answer` is what was extracted.
    """

    correct: bool | None
    reason: str
    answer: str | None = None
    detail: str = ""


def verify(
    completion: str, gold: str | float, options: MathOptions | None = None, *, pool: WorkerPool | None = None
) -> Verdict:
    """Compare the completion's final answer with the gold answer; never raises for anything either of them says.

    NoWorker where the machine has no worker for it: that is no answer's fault.
    """
    options = options or MathOptions()
    wanted = gold_text(str(gold))
    answer = answer_text(completion, options.marker)
    if quick := _quick(answer, wanted):
        return quick
    pool = pool or shared_pool()
    try:
        reason, detail = _compared(answer, wanted, options, pool)
    except DeadlineExceeded as error:
        return _stopped("time_limit", answer, wanted, options, pool, str(error))
    except WorkerLost:
        return _again(answer, wanted, options, pool)
    return _verdict(reason, detail, answer)


async def averify(
    completion: str, gold: str | float, options: MathOptions | None = None, *, pool: WorkerPool | None = None
) -> Verdict:
    """`verify` that does not block the event loop."""
    options = options or MathOptions()
    if quick := _quick(answer_text(completion, options.marker), gold_text(str(gold))):
        return quick
    pool = pool or shared_pool()
    return await pool.arun(functools.partial(verify, completion, gold, options, pool=pool))


class MathReward:
    """1 for a right answer, 0 for a wrong or missing one, no verdict where the gold cannot be read.

    ```toml
    [env.args.rewards.correct]
    path = "agentrl.reward.math:MathReward"
    args = {marker = "boxed"}
    ```

    `gold` names the row's column; the other arguments are those of `MathOptions`.
    """

    def __init__(self, *, gold: str = "answer", **options: Any) -> None:
        require_sympy()
        self.gold = gold
        self.options = MathOptions(**options)

    async def __call__(self, completion: str, row: Row) -> Score:
        verdict = await averify(completion, row[self.gold], self.options)
        info = {"math_reason": verdict.reason, "math_answer": verdict.answer, "math_detail": verdict.detail}
        if verdict.correct is None:
            return Score(None, {}, info)
        return Score(float(verdict.correct), {"answered": float(verdict.answer is not None)}, info)


def require_sympy() -> None:
    """ConfigError, with its remedy, where the comparison cannot run."""
    if importlib.util.find_spec("sympy") is None:
        raise ConfigError("math rewards need sympy: pip install 'agentrl[envs]'")


def _quick(answer: str | None, gold: str) -> Verdict | None:
    """Plain integers need no worker."""
    if not _INTEGER.fullmatch(gold):
        return None
    if answer is None:
        return Verdict(False, "no_answer")
    if _INTEGER.fullmatch(answer):
        return Verdict(int(answer) == int(gold), "equal" if int(answer) == int(gold) else "different", answer)
    return None


def _compared(answer: str | None, gold: str, options: MathOptions, pool: WorkerPool) -> tuple[str, str]:
    # By CPU time: on a busy machine the same answer would be right today and too slow tomorrow.
    tolerance, percent = options.relative_tolerance, options.lenient_percent
    reason, detail = pool.call(CHECK, answer, gold, tolerance, percent, seconds=options.seconds, by_cpu=True)
    return reason, detail


def _verdict(reason: str, detail: str, answer: str | None) -> Verdict:
    if reason == "gold_unparseable":
        return Verdict(None, reason, answer, detail)
    if answer is None:
        return Verdict(False, "no_answer")
    return Verdict(reason == "equal", reason, answer, detail)


def _again(answer: str | None, gold: str, options: MathOptions, pool: WorkerPool) -> Verdict:
    """A worker may have been killed from outside. One that dies twice dies of what it was given."""
    try:
        reason, detail = _compared(answer, gold, options, pool)
    except (DeadlineExceeded, WorkerLost) as error:
        return _stopped("worker_lost", answer, gold, options, pool, str(error))
    return _verdict(reason, detail, answer)


def _stopped(what: str, answer: str | None, gold: str, options: MathOptions, pool: WorkerPool, why: str) -> Verdict:
    """Whose fault it is: a gold that cannot be read in time by itself is a fault of the data."""
    if _INTEGER.fullmatch(gold):
        return Verdict(False, what, answer, why)
    try:
        reason, detail = pool.call(CHECK, None, gold, 0.0, False, seconds=min(options.seconds, 3.0), by_cpu=True)
    except (DeadlineExceeded, WorkerLost) as error:
        return Verdict(None, "gold_unparseable", answer, str(error))
    return _verdict(reason, detail, answer) if reason != "equal" else Verdict(False, what, answer, why)
