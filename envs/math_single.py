r"""Math problems, answered once: the last `\boxed{…}` is compared exactly with the row's answer.

    user       What is 3/8 as a decimal? End with your answer in \boxed{}.
    assistant  3 divided by 8 is \boxed{0.375}.                                    1.0

A row is `{"question", "answer"}`; GSM8K's answers (with `####`) and boxed ones are understood as they are. Without a
data file the problems are reasoning-gym's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.reward.compose import Composed, Part, shared
from agentrl.reward.extract import gold_text
from agentrl.reward.math import MathReward
from agentrl.types import Info, Message, Row, Step

INSTRUCTION = "End with your answer in \\boxed{}."
SIZES = {"train": 20_000, "eval": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    "simple_equations": {},
    "fraction_simplification": {"styles": ("latex_frac",)},
    "gcd": {},
}


class MathSingle(Env):
    """`rewards` is a table of parts as in docs/rewards.md; by default the answer's correctness alone."""

    def __init__(self, row: Row, *, instruction: str = INSTRUCTION, rewards: Mapping[str, Any] | None = None) -> None:
        super().__init__(row)
        self.instruction = instruction
        self.reward_range = None if rewards else (0.0, 1.0)
        self.reward = shared(rewards) if rewards else Composed({"correct": Part(MathReward())})
        self.over = True

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """The families in turn; no question is in both splits, whatever the seeds."""
        # Two seconds of import that only the maker of rows pays.
        import reasoning_gym

        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        problems = [
            reasoning_gym.create_dataset(name, seed=1_000_003 * seed, size=100 * SIZES[split], **sizes)
            for name, sizes in FAMILIES.items()
        ]
        made = at = 0
        while made < SIZES[split]:
            problem = problems[at % len(problems)][at // len(problems)]
            at += 1
            question: str = problem["question"]
            if (zlib.crc32(question.encode()) % 8 == 0) == (split == "eval"):
                made += 1
                yield {"question": question, "answer": problem["answer"].strip("$ ")}

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The question and how to answer; nothing is random."""
        self.over = False
        return [{"role": "user", "content": f"{self.row['question']}\n{self.instruction}".strip()}], {}

    async def step(self, action: Message) -> Step:
        """Judge the answer."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        self.over = True
        found = await self.reward(action.get("content") or "", self.row)
        return Step([], found.value, True, False, {"reward_parts": dict(found.parts), **found.info})

    def oracle(self, messages: list[Message]) -> str:
        """The gold answer, in a box."""
        return f"\\boxed{{{gold_text(str(self.row['answer']))}}}"
