"""MCP servers as tools, through the `mcp` SDK: a program that talks over its pipes, or a URL.

```python
server = McpServer(command=("python", "my_server.py"))
async with McpClient(server) as client:              # a server of this episode's own
    self.tools = client.tools(only=("search", "buy"))
    ...
    step = await run_tools(self.tools, action)
    state = await client.call("state", {})           # not offered to the model: for the reward

async with shared_client(server) as client:          # one for all episodes of this process that want it
    self.tools = client.tools(fixed={"account": self.account})   # sent with each call, and not in the schema
```

What a tool answers, its errors and its time-outs are observations. A server that does not start, dies or stops
answering is nobody's answer: an InfrastructureError, which the runner plays again. No wait is without a deadline.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import ConfigError, ContractError, InfrastructureError
from agentrl.tool import Tool

if TYPE_CHECKING:
    import mcp

PROBE_SECONDS = 10.0
"""After a call ran out of time: how long the server has to show that it lives."""
CLOSE_SECONDS = 15.0
_TAIL = 600


class McpServer(BaseModel):
    """Where a server is: a `command` to start, or the `url` of one that runs (streamable HTTP)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = ()
    """The program and its arguments; it gets a handful of the usual environment variables, and `env`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the program, secrets among them."""
    cwd: str | None = None
    """The program's directory."""
    url: str | None = None
    """For example `http://localhost:8000/mcp`."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with each request to `url`, `Authorization` for one."""
    start_seconds: float = Field(default=60.0, gt=0)
    """How long starting it and listing its tools may take."""
    call_seconds: float = Field(default=30.0, gt=0)
    """How long one call may take."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has either a command or a url")
        if self.url and (self.env or self.cwd):
            raise ValueError("env and cwd have no effect on a server at a url: it runs already")
        if self.command and self.headers:
            raise ValueError("headers have no effect on a server that is a command")
        return self

    @property
    def name(self) -> str:
        """For messages."""
        return f"MCP server {self.url or ' '.join(self.command)!r}"


class ToolServerLost(InfrastructureError):
    """The server did not start, died, or answers no more."""


class Answer(NamedTuple):
    """What a tool said: its `text`, `data` where it gave any, and whether it was an error."""

    text: str
    data: Any
    failed: bool


class McpClient:
    """A connection. The task that opened it must not be the one that closes it: a task of its own holds it."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.lost: str | None = None
        """Why it is of no use any more."""
        self._owner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[mcp.Client] | None = None
        self._closing = asyncio.Event()
        self._listed: list[mcp.Tool] = []
        self._errlog = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115

    async def __aenter__(self) -> McpClient:
        """See `open`."""
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """See `close`."""
        await self.close()

    async def open(self) -> None:
        """Start or reach the server and list its tools. Safe to call again and from several tasks.

        Raises ConfigError where there is no such program, ToolServerLost where it did not come up.
        """
        if self._owner is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._own(), name=self.server.name)
        assert self._ready is not None
        either: set[asyncio.Future[Any]] = {self._owner, self._ready}
        await asyncio.wait(either, timeout=self.server.start_seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done() and not self._owner.done():
            return
        if not self._owner.done():
            raise self._fail(f"did not list its tools within {self.server.start_seconds:g} s")
        error = None if self._owner.cancelled() else self._owner.exception()
        causes = _leaves(error) if error else []
        if self.server.command and any(isinstance(cause, FileNotFoundError | PermissionError) for cause in causes):
            raise ConfigError(f"{self.server.name} cannot be started: {causes[0]}") from error
        raise self._fail(f"did not start: {'; '.join(map(_said, causes)) or 'it ended'}") from error

    async def close(self) -> None:
        """End the connection, and the program where it is one. Safe to call again."""
        self.lost = self.lost or "it was closed"
        self._closing.set()
        if self._owner is not None:
            # The SDK gives a program two seconds to end by itself, then kills it.
            await asyncio.wait({self._owner}, timeout=CLOSE_SECONDS if self._is_open() else 0)
            if not self._owner.done():
                self._owner.cancel()
                await asyncio.wait({self._owner}, timeout=CLOSE_SECONDS)
            if self._owner.done() and not self._owner.cancelled():
                self._owner.exception()  # told where it mattered
        self._errlog.close()

    def tools(self, only: Sequence[str] | None = None, *, fixed: Mapping[str, Any] | None = None) -> tuple[Tool, ...]:
        """The server's tools, or those of the names in `only`, in its order.

        `fixed` arguments are sent with each call of a tool that has them, and the model is not told of them.
        """
        by_name = {listed.name: listed for listed in self._listed}
        if missing := [name for name in only or () if name not in by_name]:
            raise ContractError(f"{self.server.name} has no tools {missing}; it has {sorted(by_name)}")
        return tuple(self._tool(by_name[name], fixed or {}) for name in only or by_name)

    async def call(self, name: str, arguments: Mapping[str, Any], *, seconds: float | None = None) -> Answer:
        """Call a tool. Raises TimeoutError after `seconds`, ToolServerLost where the server is the reason."""
        if self.lost is not None:
            raise ToolServerLost(f"{self.server.name}: {self.lost}")
        if self._ready is None or not self._ready.done():
            raise ContractError(f"{self.server.name} is not open: use `async with McpClient(server)`")
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = self._ready.result()
        limit = seconds or self.server.call_seconds
        try:
            result = await self._within(client.call_tool(name, dict(arguments)), limit)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise self._fail("ended during a call") from error
            return Answer(str(error), None, True)
        except TimeoutError:
            await self._probe(client)
            raise
        return Answer(_text(result), result.structured_content, bool(result.is_error))

    def _is_open(self) -> bool:
        return self._ready is not None and self._ready.done()

    async def _own(self) -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(self._connection())
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                self._listed += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert self._ready is not None
            self._ready.set_result(client)
            await self._closing.wait()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[mcp.Client]:
        import httpx2  # these take a second to import
        import mcp
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self.server
        if server.url is not None:
            wait = httpx2.Timeout(30.0, read=server.call_seconds + PROBE_SECONDS)
            async with (
                httpx2.AsyncClient(headers=server.headers, timeout=wait) as http,
                mcp.Client(streamable_http_client(server.url, http_client=http)) as client,
            ):
                yield client
            return
        program = mcp.StdioServerParameters(
            command=server.command[0], args=list(server.command[1:]), env=server.env, cwd=server.cwd
        )
        async with mcp.Client(stdio_client(program, errlog=self._errlog)) as client:
            yield client

    async def _within(self, work: Any, seconds: float) -> Any:
        """The result of `work`; TimeoutError after `seconds`, ToolServerLost where the connection ends first."""
        assert self._owner is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._owner}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._owner.done():
                raise self._fail("ended during a call")
            raise TimeoutError(f"no answer within {seconds:g} s")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)

    async def _probe(self, client: mcp.Client) -> None:
        try:
            await self._within(client.session.list_tools(), PROBE_SECONDS)
        except Exception as error:  # whatever it is: it does not answer
            raise self._fail(f"answers no more ({_said(error)})") from error

    def _fail(self, what: str) -> ToolServerLost:
        self.lost = self.lost or what
        self._closing.set()
        tail = ""
        if not self._errlog.closed:
            self._errlog.seek(0)
            tail = self._errlog.read()[-_TAIL:].strip()
        return ToolServerLost(f"{self.server.name} {what}" + (f"; it had said: {tail}" if tail else ""))

    def _tool(self, listed: mcp.Tool, fixed: Mapping[str, Any]) -> Tool:
        parameters: dict[str, Any] = {"type": "object", "properties": {}, **listed.input_schema}
        mine = {name: value for name, value in fixed.items() if name in parameters["properties"]}
        if mine:
            parameters["properties"] = {k: v for k, v in parameters["properties"].items() if k not in mine}
            parameters["required"] = [name for name in parameters.get("required", ()) if name not in mine]
        parameters = {key: value for key, value in parameters.items() if key not in ("title", "$schema")}
        seconds = self.server.call_seconds

        async def ask(**arguments: Any) -> str:
            try:
                answer = await self.call(listed.name, {**arguments, **mine}, seconds=seconds)
            except TimeoutError:
                return f"error: {listed.name} did not finish within {seconds:g} s"
            return f"error: {answer.text}" if answer.failed else answer.text

        return Tool.described(
            listed.name, listed.description or "", parameters, ask, timeout=seconds + PROBE_SECONDS + 5.0
        )


@dataclass(slots=True)
class _Shared:
    client: McpClient
    users: int = 0


_Shelf = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Shared]]


# A server takes a second to start, and environments are made one an episode.
@functools.cache
def _shelf() -> _Shelf:
    return weakref.WeakKeyDictionary()


@asynccontextmanager
async def shared_client(server: McpServer) -> AsyncIterator[McpClient]:
    """The connection that everybody in this event loop shares; closed when the last one leaves, renewed when lost."""
    clients = _shelf().setdefault(asyncio.get_running_loop(), {})
    key = server.model_dump_json()
    shared = clients.get(key)
    if shared is None or shared.client.lost is not None:
        shared = clients[key] = _Shared(McpClient(server))
    shared.users += 1
    try:
        await shared.client.open()
        yield shared.client
    finally:
        shared.users -= 1
        if shared.users == 0:
            if clients.get(key) is shared:
                del clients[key]
            await shared.client.close()


def _text(result: mcp.types.CallToolResult) -> str:
    from mcp.types import EmbeddedResource, ResourceLink, TextContent, TextResourceContents

    parts = []
    for block in result.content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        elif isinstance(block, ResourceLink):
            parts.append(str(block.uri))
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            parts.append(block.resource.text)
        else:
            parts.append(f"({block.type} that cannot be shown)")
    if not parts and result.structured_content is not None:
        from pydantic_core import to_json

        return to_json(result.structured_content).decode()
    return "\n".join(parts)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
