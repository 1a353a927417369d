"""Sums shown by example: a solved one stands before the question as a chat, and the reply must look like it.

    user       41 + 7                   assistant  41 + 7 = 48                     (given)
    user       35 + 48
    assistant  35 + 48 = 83                                                        1.0

The smallest task on which a real pretrained model shows its learning within minutes on a CPU. The reply repeats the sum
because SmolLM2-135M then starts at 0.4; with the bare number it starts near 0, and nothing rewarded is ever sampled.
A row is `{"a", "b", "shots"}`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

from agentrl.agent import Agent, ChatClient
from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.types import Info, Message, Row, Step

SIZES = {"train": 20_000, "eval": 256}
SHOTS = 1
LARGEST = 50


class FewshotSums(Env):
    """`system` is the system message; an empty one keeps a model's own long default away."""

    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, system: str = "") -> None:
        super().__init__(row)
        self.system = system
        self.over = True

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """Sums of two numbers up to 50 and an example each; no sum is in both splits, whatever the seeds."""
        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        generator = random.Random(f"{seed}:{split}")
        made = 0
        while made < SIZES[split]:
            (a, b), *shots = ([generator.randint(1, LARGEST) for _ in range(2)] for _ in range(1 + SHOTS))
            # By the unordered pair: 3 + 5 gives 5 + 3 away.
            held_out = zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 8 == 0
            if held_out == (split == "eval"):
                made += 1
                yield {"a": a, "b": b, "shots": shots}

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The solved sums as turns of the chat, then the question; nothing is random."""
        self.over = False
        messages: list[Message] = [{"role": "system", "content": self.system}]
        for a, b in self.row["shots"]:
            messages += [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": _solved(a, b)}]
        return [*messages, {"role": "user", "content": f"{self.row['a']} + {self.row['b']}"}], {}

    async def step(self, action: Message) -> Step:
        """Judge the answer."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        self.over = True
        # A small model may go on with sums of its own on the next line.
        said = (action.get("content") or "").strip().partition("\n")[0].strip()
        right = said == _solved(self.row["a"], self.row["b"])
        return Step([], float(right), True, False, {"said": said[:40]})

    def oracle(self, messages: list[Message]) -> str:
        """The sum, as the example writes it."""
        return _solved(self.row["a"], self.row["b"])


def _solved(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}"


class Brief(Agent):
    """Asks for at most `max_tokens` tokens: an answer is short, and waiting for more of it is lost time."""

    def __init__(self, tools: Any = (), *, max_tokens: int = 14) -> None:
        super().__init__(tools)
        self.max_tokens = max_tokens

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """One short answer."""
        self.messages += observation
        reply = await client.chat.completions.create(model="policy", messages=self.messages, max_tokens=self.max_tokens)
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return self.messages[-1]
