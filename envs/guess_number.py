"""Guess a number by being told higher or lower: the smallest environment of several turns.

    user       Guess my number from 1 to 9. Answer with the number alone; you have 4 guesses.
    assistant  5
    user       higher
    assistant  7                                                                    1.0

A row is `{"low", "high", "secret"}`. What is no number costs a guess.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.types import Info, Message, Row, Step

SIZES = {"train": 20_000, "eval": 256}
HIGHER, LOWER, NO_NUMBER = "higher", "lower", "that is no number"


class GuessNumber(Env):
    """`guesses` may be made. Each beyond the first takes `cost` from the reward of 1."""

    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, guesses: int = 4, cost: float = 0.0) -> None:
        if guesses < 1 or not 0 <= cost * (guesses - 1) <= 1:
            raise ContractError(f"guesses = {guesses} must be at least 1 and cost = {cost} leave a reward of 0 to 1")
        super().__init__(row)
        self.guesses, self.cost = guesses, cost
        self.made = 0
        self.low, self.high = int(row["low"]), int(row["high"])
        self.over = True

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """Ranges of 5 to 9 numbers anywhere below 100; no row is in both splits, whatever the seeds."""
        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        generator = random.Random(seed)
        made = 0
        while made < SIZES[split]:
            low = generator.randint(1, 90)
            high = low + generator.randint(4, 8)
            row = {"low": low, "high": high, "secret": generator.randint(low, high)}
            if (zlib.crc32(repr(row).encode()) % 8 == 0) == (split == "eval"):
                made += 1
                yield row

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The range; nothing is random."""
        self.made, self.over = 0, False
        self.low, self.high = int(self.row["low"]), int(self.row["high"])
        text = f"Guess my number from {self.low} to {self.high}. Answer with the number alone; you have {self.guesses} "
        return [{"role": "user", "content": text + ("guess." if self.guesses == 1 else "guesses.")}], {}

    async def step(self, action: Message) -> Step:
        """Compare the guess."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        self.made += 1
        said, secret = (action.get("content") or "").strip(), int(self.row["secret"])
        guess = int(said) if said.isdecimal() and len(said) < 10 else None
        if guess == secret:
            self.over = True
            return Step([], 1.0 - self.cost * (self.made - 1), True, False, {"guesses": self.made})
        if self.made == self.guesses:
            self.over = True
            return Step([], 0.0, True, False, {"guesses": self.made})
        if guess is None:
            return Step([{"role": "user", "content": NO_NUMBER}], 0.0, False, False, {})
        if guess < secret:
            self.low = max(self.low, guess + 1)
            return Step([{"role": "user", "content": HIGHER}], 0.0, False, False, {})
        self.high = min(self.high, guess - 1)
        return Step([{"role": "user", "content": LOWER}], 0.0, False, False, {})

    def oracle(self, messages: list[Message]) -> str:
        """The secret."""
        return str(self.row["secret"])
