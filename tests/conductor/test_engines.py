"""The run's engine servers, as the conductor asks them."""

from __future__ import annotations

import asyncio
import time

from agentrl.conductor.engines import counters_of
from agentrl.engine.client import EngineClient


async def test_engines_that_do_not_answer_are_waited_for_together() -> None:
    def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    clients = [EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") for _ in range(8)]
    begin = time.monotonic()
    assert await counters_of(clients) == []
    assert time.monotonic() - begin < 6
    for client in clients:
        await client.close()
    for writer in held:
        writer.close()
    server.close()
