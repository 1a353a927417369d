r"""Math problems with feedback: a wrong answer is told what is wrong with it, and may be mended for less.

    user       Simplify 6/8. End with your answer in \boxed{}.
    assistant  It is 3/4.
    user       There is no \boxed{} in your answer.
    assistant  \boxed{\frac{3}{4}}                                                 0.7

Rows are those of `math_single`.
"""

from __future__ import annotations

from typing import Any

from agentrl.env import Env
from agentrl.envs.math_single import INSTRUCTION, MathSingle
from agentrl.errors import ContractError
from agentrl.reward.extract import gold_text
from agentrl.reward.math import averify
from agentrl.reward.options import MathOptions
from agentrl.types import Info, Message, Row, Step

FEEDBACK = {
    "no_answer": "There is no \\boxed{} in your answer.",
    "answer_unparseable": "Your boxed answer could not be read: {answer}. Write one number, expression or list.",
    "different": "{answer} is not right. Check your steps and try again.",
    "time_limit": "{answer} is too complicated to check. Simplify it.",
    "worker_lost": "{answer} is too complicated to check. Simplify it.",
}


class MathFeedback(Env):
    """At most `tries` answers; a right one earns `discount` to the power of the wrong ones before it."""

    rows = MathSingle.rows
    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, tries: int = 3, discount: float = 0.7, marker: str = "boxed") -> None:
        if tries < 1 or not 0 <= discount <= 1:
            raise ContractError(f"tries = {tries} must be at least 1 and discount = {discount} from 0 to 1")
        super().__init__(row)
        self.tries, self.discount = tries, discount
        self.options = MathOptions(marker=marker)
        self.wrong = 0
        self.over = True

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The question; nothing is random."""
        self.wrong, self.over = 0, False
        return [{"role": "user", "content": f"{self.row['question']}\n{INSTRUCTION}"}], {}

    async def step(self, action: Message) -> Step:
        """Judge the answer; say what is wrong where there is another try."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        verdict = await averify(action.get("content") or "", self.row["answer"], self.options)
        info = {"math_reason": verdict.reason, "tries": self.wrong + 1}
        if verdict.correct is not False:
            self.over = True
            return Step([], self.discount**self.wrong if verdict.correct else None, True, False, info)
        self.wrong += 1
        self.over = self.wrong >= self.tries
        if self.over:
            return Step([], 0.0, True, False, info)
        told = FEEDBACK[verdict.reason].replace("{answer}", verdict.answer or "")
        return Step([{"role": "user", "content": told}], 0.0, False, False, info)

    def oracle(self, messages: list[Message]) -> str:
        """The gold answer; of the default marker."""
        return f"\\boxed{{{gold_text(str(self.row['answer']))}}}"
