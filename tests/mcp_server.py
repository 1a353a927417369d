"""A real MCP server for tests: `mcp_server.py stdio`, or `mcp_server.py http FD` on the listening socket FD."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test", log_level="ERROR")
notes: dict[str, list[str]] = {}


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
    """
    return a + b


@server.tool()
def note(book: str, text: str) -> str:
    """Write a note."""
    notes.setdefault(book, []).append(text)
    return f"{len(notes[book])} notes"


@server.tool()
def state(book: str) -> dict[str, Any]:
    """All notes of a book."""
    return {"notes": notes.get(book, []), "pid": os.getpid()}


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
async def wait(seconds: float) -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def freeze(seconds: float) -> str:
    """Do nothing else for a while."""
    time.sleep(seconds)
    return "done"


@server.tool()
def die() -> str:
    """End the server."""
    print("the server was asked to die", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        import uvicorn

        listening = socket.socket(fileno=int(sys.argv[2]))
        serving = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error"))
        asyncio.run(serving.serve(sockets=[listening]))
