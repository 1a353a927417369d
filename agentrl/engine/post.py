"""POST over kept connections, for the one call that is made a million times: a third of a general client's CPU time.

HTTP/1.1 without TLS, answers in one piece (by length, chunked, or up to the connection's end). Streams, control calls
and https go through aiohttp.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

_IDLE_SECONDS = 3.0
"""Servers close idle connections after 5 s; ours goes first, so that a request never meets a closed one."""
_UNTIL_CLOSED, _CHUNKED = -1, -2


class Unreachable(ConnectionError):
    """No connection could be made, so nothing was asked."""


class Answer(NamedTuple):
    """A whole response."""

    status: int
    body: bytes


class Poster:
    """Connections to one `host:port`; as many as there are requests at once."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._idle: list[tuple[float, _Connection]] = []
        name = f"[{host}]" if ":" in host else host
        self._head = f"Host: {name}:{port}\r\nContent-Type: application/json\r\nContent-Length: "

    async def post(self, path: str, body: bytes) -> Answer:
        """Send `body` and wait for the answer. `Unreachable` where there is no server, ConnectionError where it went
        away after it was asked; a cancelled call closes its connection."""
        loop = asyncio.get_running_loop()
        connection = self._kept(loop.time()) or await self._connect(loop)
        try:
            answer = await connection.ask(f"POST {path} HTTP/1.1\r\n{self._head}{len(body)}\r\n\r\n".encode() + body)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append((loop.time(), connection))
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close the connections that nobody uses."""
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()

    def _kept(self, now: float) -> _Connection | None:
        while self._idle:
            since, connection = self._idle.pop()
            if connection.reusable and now - since < _IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        except OSError as error:
            raise Unreachable(f"{self._host}:{self._port}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._buffer = bytearray()
        self._status = 0
        self._length = 0
        self._body_at = 0

    async def ask(self, request: bytes) -> Answer:
        assert self._transport is not None, "asyncio calls connection_made first"
        self._waiting = asyncio.get_running_loop().create_future()
        self._status, self._body_at = 0, 0
        self._buffer.clear()
        self._transport.write(request)
        return await self._waiting

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            done = (self._status or self._read_head()) and self._read_body()
        except ValueError as error:
            self.reusable = False
            self._fail(ConnectionError(f"the answer is not HTTP/1.1: {error}"))
            return
        if done:
            self._finish()

    def eof_received(self) -> None:
        self.reusable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if exc is None and self._status and self._length == _UNTIL_CLOSED:
            self._finish()
        self._fail(ConnectionResetError(f"the server closed the connection before its answer was whole ({exc})"))

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_head(self) -> bool:
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
            version, status, *_ = first.split(" ", 2)
            if not version.startswith("HTTP/1."):
                raise ValueError(f"it begins with {first!r:.80}")
            if 100 <= int(status) < 200:
                del self._buffer[: end + 4]  # "go on": the answer is still to come
                continue
            headers = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
            if "chunked" in headers.get("transfer-encoding", "").lower():
                self._length = _CHUNKED
            else:
                self._length = int(headers.get("content-length", _UNTIL_CLOSED))
            kept = headers.get("connection", "").lower() != "close" and version != "HTTP/1.0"
            self.reusable &= kept and self._length != _UNTIL_CLOSED
            self._status, self._body_at = int(status), end + 4
            return True
        return False

    def _read_body(self) -> bool:
        if self._length == _CHUNKED:
            return self._read_chunks()
        return self._length >= 0 and len(self._buffer) - self._body_at >= self._length

    def _read_chunks(self) -> bool:
        """Whether the last chunk is there; then the buffer holds the body in one piece."""
        at = self._body_at
        pieces: list[bytes] = []
        while (line := self._buffer.find(b"\r\n", at)) >= 0:
            size = int(bytes(self._buffer[at:line]).split(b";")[0], 16)
            if size < 0:
                raise ValueError(f"a chunk of {size} bytes")
            if size == 0:
                if self._buffer.find(b"\r\n\r\n", line) < 0:
                    return False  # trailers are still to come
                self._buffer[self._body_at :] = b"".join(pieces)
                self._length = len(self._buffer) - self._body_at
                return True
            at = line + 2 + size + 2
            if at > len(self._buffer):
                return False
            pieces.append(bytes(self._buffer[line + 2 : line + 2 + size]))
        return False

    def _finish(self) -> None:
        end = len(self._buffer) if self._length == _UNTIL_CLOSED else self._body_at + self._length
        if len(self._buffer) > end:
            self.reusable = False  # more than was asked for
        body = bytes(memoryview(self._buffer)[self._body_at : end])
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(Answer(self._status, body))

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
