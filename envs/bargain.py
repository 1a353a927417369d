"""Two agents bargain over a price: each knows what the thing is worth to itself alone, and each has its own reward.

    to the buyer    You buy. It is worth 9 to you. Say a price, or accept.
    buyer           4
    to the seller   You sell. It is worth 3 to you. The buyer says 4. Say a price, or accept.
    seller          accept                                        buyer 5/6, seller 1/6

A row is `{"cost", "value"}`, the worth to the seller and to the buyer. Without a deal, or with a price outside their
worths, both have 0: whoever agreed to a loss has only itself to blame. Play it with an agent that takes turns, such as
`agentrl.agents.in_turn:InTurn`; the step that ends it says whose the reward is in `info["agent_rewards"]`.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.types import Info, Message, Row, Step

ASKED = "Say a price, or accept."
AGENTS = ("buyer", "seller")
SIZES = {"train": 20_000, "eval": 256}


class Bargain(Env):
    """Each agent speaks at most `rounds` times, the buyer first."""

    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, rounds: int = 3) -> None:
        if rounds < 1:
            raise ContractError(f"rounds = {rounds} must be at least 1")
        super().__init__(row)
        self.rounds = rounds
        self.spoken = 0
        self.price: int | None = None
        self.over = True

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """Worths from 0 to 99 that leave room for a deal; no row is in both splits, whatever the seeds."""
        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        generator = random.Random(seed)
        made = 0
        while made < SIZES[split]:
            cost = generator.randint(1, 89)
            row = {"cost": cost, "value": generator.randint(cost + 4, min(cost + 40, 99))}
            if (zlib.crc32(repr(row).encode()) % 8 == 0) == (split == "eval"):
                made += 1
                yield row

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """What the buyer is told; nothing is random."""
        self.spoken, self.price, self.over = 0, None, False
        return [self._told()], {}

    async def step(self, action: Message) -> Step:
        """The word of the one whose turn it is; the observation is for the other one."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        said = (action.get("content") or "").strip().lower()
        self.spoken += 1
        if said == "accept" and self.price is not None:
            return self._end(self.price)
        number = re.fullmatch(r"\d{1,4}", said)
        self.price = int(number[0]) if number else self.price
        if self.spoken == 2 * self.rounds:
            return self._end(None)
        return Step([self._told()], 0.0, False, False, {})

    def oracle(self, messages: list[Message]) -> str:
        """Both know a fair price."""
        return str((self.row["cost"] + self.row["value"]) // 2) if self.price is None else "accept"

    def _told(self) -> Message:
        selling = self.spoken % 2 == 1
        worth = self.row["cost"] if selling else self.row["value"]
        heard = f" The {AGENTS[not selling]} says {self.price}." if self.price is not None else ""
        return {
            "role": "user",
            "content": f"You {'sell' if selling else 'buy'}. It is worth {worth} to you.{heard} {ASKED}",
        }

    def _end(self, price: int | None) -> Step:
        self.over = True
        cost, value = int(self.row["cost"]), int(self.row["value"])
        gain = (price - cost) / (value - cost) if price is not None and cost <= price <= value else None
        rewards = {"buyer": 0.0 if gain is None else 1.0 - gain, "seller": gain or 0.0}
        return Step([], sum(rewards.values()), True, False, {"agent_rewards": rewards, "price": price})
