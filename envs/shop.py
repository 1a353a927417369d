"""Buy what is asked for in a shop that is an MCP server; what counts is the shop's ledger, not what is said.

    user       Buy 2 of the cheapest pen and 1 of the cheapest cup, and pay. Say done when you have.
    assistant  find("pen")
    tool       red pen: 3 coins, blue pen: 2 coins
    assistant  order("blue pen", 2)   order("tin cup", 1)
    tool       2 x blue pen: 4 coins   1 x tin cup: 3 coins
    assistant  pay()
    tool       paid 7 coins
    assistant  done                                                                 1.0

A row is `{"stock": {article: price}, "wanted": {kind: count}}`; an article's kind is its last word. The server is
`agentrl.envs.shop_server`: one for all episodes, each with a shop of its own.
"""

from __future__ import annotations

import json
import random
import sys
import uuid
import zlib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.mcp import McpClient, McpServer, shared_client
from agentrl.tool import run_tools
from agentrl.types import Info, Message, Row, Step

SERVER = McpServer(command=(sys.executable, "-m", "agentrl.envs.shop_server"))
SHOWN = ("find", "order", "pay")
SIZES = {"train": 20_000, "eval": 256}
KINDS = ("pen", "cup", "hat", "bag", "key", "mat")
MAKES = ("red", "blue", "old", "big", "tin", "new")


class Shop(Env):
    """`partial` is earned, by share, for wanted things among what was paid; all of them and nothing else earn 1."""

    reward_range = (0.0, 1.0)

    def __init__(self, row: Row, *, partial: float = 0.5) -> None:
        super().__init__(row)
        self.partial = partial
        self.over = True
        self._open = AsyncExitStack()
        self._server: McpClient | None = None
        self._shop = ""

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """One to three kinds wanted of those in stock; no row is in both splits, whatever the seeds."""
        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        generator = random.Random(seed)
        made = 0
        while made < SIZES[split]:
            stock: dict[str, int] = {}
            for kind in generator.sample(KINDS, 3):
                prices = generator.sample(range(1, 10), 2)
                stock |= {
                    f"{make} {kind}": price for make, price in zip(generator.sample(MAKES, 2), prices, strict=True)
                }
            kinds = generator.sample(sorted({name.split()[-1] for name in stock}), generator.randint(1, 3))
            row = {"stock": stock, "wanted": {kind: generator.randint(1, 4) for kind in kinds}}
            if (zlib.crc32(repr(row).encode()) % 8 == 0) == (split == "eval"):
                made += 1
                yield row

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """A new shop with the row's stock, and the errand; nothing is random."""
        await self.close()
        self._open = AsyncExitStack()
        self._server = await self._open.enter_async_context(shared_client(SERVER))
        self._shop = uuid.uuid4().hex
        await self._server.call("open_shop", {"shop": self._shop, "stock": dict(self.row["stock"])})
        self.tools = self._server.tools(SHOWN, fixed={"shop": self._shop})
        self.over = False
        wanted = " and ".join(f"{count} of the cheapest {kind}" for kind, count in self.row["wanted"].items())
        return [{"role": "user", "content": f"Buy {wanted}, and pay. Say done when you have."}], {}

    async def step(self, action: Message) -> Step:
        """Run the calls; where there are none, look at what was paid for."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        if action.get("tool_calls"):
            return Step(await run_tools(self.tools, action), 0.0, False, False, {})
        self.over = True
        assert self._server is not None
        paid = (await self._server.call("ledger", {"shop": self._shop})).data["paid"]
        return Step([], self._reward(paid), True, False, {"paid": paid})

    async def close(self) -> None:
        """The shop is forgotten; the server goes with its last shop."""
        server, self._server = self._server, None
        if server is not None and server.lost is None:
            await server.call("close_shop", {"shop": self._shop})
        await self._open.aclose()

    def oracle(self, messages: list[Message]) -> Message | str:
        """Orders, then pays, then says so: calls of one message run side by side."""
        answered = sum(message["role"] == "assistant" for message in messages)
        if answered == 0:
            return _calls(*(("order", {"article": name, "count": n}) for name, n in self._cheapest().items()))
        return _calls(("pay", {})) if answered == 1 else "done"

    def _cheapest(self) -> dict[str, int]:
        stock: dict[str, int] = self.row["stock"]
        return {
            min((name for name in stock if name.split()[-1] == kind), key=stock.__getitem__): count
            for kind, count in self.row["wanted"].items()
        }

    def _reward(self, paid: dict[str, int]) -> float:
        wanted = self._cheapest()
        if paid == wanted:
            return 1.0
        return self.partial * sum(paid.get(name) == count for name, count in wanted.items()) / len(wanted)


def _calls(*asked: tuple[str, dict[str, Any]]) -> Message:
    calls = [
        {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(asked)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}
