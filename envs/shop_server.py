"""The MCP server of `agentrl.envs.shop`: many shops in one process, each with its stock, its basket and its ledger.

python -m agentrl.envs.shop_server            # talks over its pipes, as MCP servers do
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError


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
            raise ToolError(f"there is no article {article!r}")
        if not 1 <= count <= 99:
            raise ToolError(f"a count of {count} is not possible, only 1 to 99")
        books.basket[article] = books.basket.get(article, 0) + count
        return f"{count} x {article}: {count * books.stock[article]} coins"

    def pay(self, shop: str) -> str:
        """Pay for what is in the basket."""
        books = self._of(shop)
        if not books.basket:
            raise ToolError("the basket is empty")
        for article, count in books.basket.items():
            books.paid[article] = books.paid.get(article, 0) + count
        total = sum(count * books.stock[article] for article, count in books.basket.items())
        books.basket.clear()
        return f"paid {total} coins"

    def _of(self, shop: str) -> Books:
        if shop not in self._shops:
            raise ToolError(f"there is no shop {shop!r}")
        return self._shops[shop]


def main() -> None:
    """Serve until the pipes close."""
    server = MCPServer("shop", log_level="ERROR")
    shops = Shops()
    for function in (shops.open_shop, shops.close_shop, shops.ledger, shops.find, shops.order, shops.pay):
        server.add_tool(function)
    server.run("stdio")


if __name__ == "__main__":
    main()
