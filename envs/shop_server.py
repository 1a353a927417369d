"""The MCP server of `agentrl.envs.shop`: many shops in one process, each with its stock, its basket and its ledger.

    python -m agentrl.envs.shop_server            # talks over its pipes, as MCP servers do

The protocol is a few lines of JSON, spoken here without the SDK, which takes a second to import: a server starts often
where one person plays or checks. Anything that speaks them can be a server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.tool import Tool


@dataclass(slots=True)
class Books:
    """One shop: prices by article, and counts by article."""

    stock: dict[str, int]
    basket: dict[str, int] = field(default_factory=dict)
    paid: dict[str, int] = field(default_factory=dict)


class Shops:
    """The tools; `shop` says whose they are."""

    def __init__(self) -> None:
        self._shops: dict[str, Books] = {}

    def open_shop(self, shop: str, stock: dict[str, int]) -> str:
        """Open a shop that sells `stock`: prices by article."""
        self._shops[shop] = Books(stock)
        return "open"

    def close_shop(self, shop: str) -> str:
        """Forget a shop."""
        self._shops.pop(shop, None)
        return "closed"

    def ledger(self, shop: str) -> dict[str, dict[str, int]]:
        """What was paid for and what was only ordered."""
        books = self._of(shop)
        return {"paid": books.paid, "basket": books.basket}

    def find(self, shop: str, kind: str) -> str:
        """Find the articles of a kind, and their prices."""
        found = {name: price for name, price in self._of(shop).stock.items() if name.split()[-1] == kind}
        return ", ".join(f"{name}: {price} coins" for name, price in found.items()) or f"there is no {kind}"

    def order(self, shop: str, article: str, count: int) -> str:
        """Put so many of an article into the basket."""
        books = self._of(shop)
        if article not in books.stock:
            raise ValueError(f"there is no article {article!r}")
        if not 1 <= count <= 99:
            raise ValueError(f"a count of {count} is not possible, only 1 to 99")
        books.basket[article] = books.basket.get(article, 0) + count
        return f"{count} x {article}: {count * books.stock[article]} coins"

    def pay(self, shop: str) -> str:
        """Pay for what is in the basket."""
        books = self._of(shop)
        if not books.basket:
            raise ValueError("the basket is empty")
        for article, count in books.basket.items():
            books.paid[article] = books.paid.get(article, 0) + count
        total = sum(count * books.stock[article] for article, count in books.basket.items())
        books.basket.clear()
        return f"paid {total} coins"

    def _of(self, shop: str) -> Books:
        if shop not in self._shops:
            raise ValueError(f"there is no shop {shop!r}")
        return self._shops[shop]


class Server:
    """Answers requests of the Model Context Protocol, one JSON object a line."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        self._tools = {tool.name: tool for tool in map(Tool, functions)}

    def reply(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to one message; None for a notification."""
        if "id" not in request:
            return None
        try:
            answer = {"result": self._result(request["method"], request.get("params") or {})}
        except NotImplementedError as error:
            answer = {"error": {"code": -32601, "message": f"there is no method {error}"}}
        return {"jsonrpc": "2.0", "id": request["id"], **answer}

    def _result(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            info = {"name": "shop", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        if method == "ping":
            return {}
        if method == "tools/list":
            return {"tools": [_described(tool) for tool in self._tools.values()]}
        if method == "tools/call":
            return self._call(str(params["name"]), params.get("arguments") or {})
        raise NotImplementedError(method)

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            tool = self._tools[name]
            found = tool.function(**tool.checked(arguments))
        except (KeyError, ValueError) as error:
            return {"content": [{"type": "text", "text": str(error)}], "isError": True}
        text = found if isinstance(found, str) else json.dumps(found)
        more = {"structuredContent": found} if isinstance(found, dict) else {}
        return {"content": [{"type": "text", "text": text}], **more, "isError": False}


def _described(tool: Tool) -> dict[str, Any]:
    function = tool.schema["function"]
    return {
        "name": function["name"],
        "description": function["description"],
        "inputSchema": function["parameters"],
    }


def main() -> None:
    """Serve until the pipes close."""
    shops = Shops()
    server = Server([shops.open_shop, shops.close_shop, shops.ledger, shops.find, shops.order, shops.pay])
    for line in sys.stdin:
        if (answer := server.reply(json.loads(line))) is not None:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
