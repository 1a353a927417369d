"""Whole answers over kept connections, from servers that write HTTP in every legal way and in some others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from agentrl.engine.post import Poster, Unreachable
from tests.engine.kit import own_port, until

BODY = b'{"x": [1, 2, 3]}'
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Served:
    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self.requests: list[bytes] = []
        self.ended = asyncio.Event()

    async def request(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(length))


@pytest.fixture(autouse=True)
def kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is too old for the next call because the machine stood still."""
    monkeypatch.setattr("agentrl.engine.post._IDLE_SECONDS", 600.0)


@asynccontextmanager
async def serving(answers: list[bytes], *, piece: int = 1 << 20, close: bool = False) -> AsyncIterator[Served]:
    """Answers the requests of each connection with `answers` in turn, in pieces of so many bytes."""
    served = Served()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        try:
            for answer in answers:
                await served.request(reader)
                for at in range(0, len(answer), piece):
                    writer.write(answer[at : at + piece])
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    return
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            served.ended.set()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        await server.wait_closed()


def whole(body: bytes = BODY, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers, b"", body])


def chunked(*pieces: bytes, trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "answer",
    [
        whole(),
        chunked(BODY[:3], BODY[3:]),
        chunked(BODY, trailer=b"X-Sum: 1\r\n"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + whole(),
    ],
)
async def test_every_form_of_an_answer_and_one_connection_for_all(answer: bytes, piece: int) -> None:
    async with serving([answer, answer], piece=piece) as served:
        poster = Poster("127.0.0.1", served.port)
        for _ in range(2):
            assert tuple(await poster.post("/generate", b"ask")) == (200, BODY)
        assert served.connections == 1
        assert served.requests[1].startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
        assert served.requests[1].endswith(b"\r\n\r\nask")
        poster.close()
        await served.ended.wait()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\n\r\n" + BODY, whole(BODY, b"Connection: close"), b"HTTP/1.0 200 OK\r\n\r\n" + BODY]
)
async def test_a_connection_that_the_server_ends_is_not_used_again(answer: bytes) -> None:
    async with serving([answer], close=True) as served:
        poster = Poster("127.0.0.1", served.port)
        for _ in range(2):
            assert (await poster.post("/generate", b"")).body == BODY
        assert served.connections == 2
        poster.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + BODY,
        chunked(BODY)[:-4],
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nabc\r\n",
    ],
)
async def test_half_an_answer_is_a_lost_connection(answer: bytes) -> None:
    async with serving([answer], close=True) as served:
        poster = Poster("127.0.0.1", served.port)
        with pytest.raises(ConnectionError) as lost:
            await poster.post("/generate", b"")
        assert not isinstance(lost.value, Unreachable)


async def test_errors_have_their_status() -> None:
    async with serving([b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nwait", whole()]) as served:
        poster = Poster("127.0.0.1", served.port)
        assert tuple(await poster.post("/generate", b"")) == (503, b"wait")
        assert (await poster.post("/generate", b"")).status == 200
        poster.close()


async def test_a_cancelled_call_closes_its_connection() -> None:
    async with serving([b""]) as served:
        task = asyncio.create_task(Poster("127.0.0.1", served.port).post("/generate", b""))
        await until(lambda: served.requests)
        task.cancel()
        await asyncio.wait([task])
        await served.ended.wait()


async def test_nobody_listens() -> None:
    with own_port() as port, pytest.raises(Unreachable, match=str(port)):
        await Poster("127.0.0.1", port).post("/generate", b"")


async def test_as_many_connections_as_calls_at_once() -> None:
    async with serving([whole()] * 3) as served:
        poster = Poster("127.0.0.1", served.port)
        await asyncio.gather(*(poster.post("/generate", b"") for _ in range(5)))
        await asyncio.gather(*(poster.post("/generate", b"") for _ in range(5)))
        assert served.connections == 5
        poster.close()


def test_other_event_loops_have_transports_of_their_own() -> None:
    uvloop = pytest.importorskip("uvloop")
    body = str(len(BODY)).encode()

    async def ask() -> bytes:
        async with serving([b"HTTP/1.1 200 OK\r\nContent-Length: " + body + b"\r\n\r\n" + BODY]) as served:
            poster = Poster("127.0.0.1", served.port)
            answer = await poster.post("/generate", b"{}")
            poster.close()
            return answer.body

    assert uvloop.run(ask()) == BODY
