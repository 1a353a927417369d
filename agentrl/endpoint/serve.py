"""`agentrl serve FOLDER`: a model folder behind an OpenAI-compatible URL, for any client.

Starts an engine server of its own and serves until SIGINT or SIGTERM. `engine.*` and `endpoint.*` are a run's settings.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from agentrl.config import load
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import start_engine
from agentrl.errors import EngineLost
from agentrl.types import Version


class Settings(BaseModel):
    """The command line's `engine.KEY=VALUE` and `endpoint.KEY=VALUE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineOptions = EngineOptions()
    endpoint: EndpointOptions = EndpointOptions()


async def serve(folder: Path, settings: Settings) -> None:
    """Serve the model in `folder` until a signal; EngineLost where its engine dies."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    template = ChatTemplate.load(folder)
    with tempfile.TemporaryDirectory(prefix="agentrl-serve-") as logs:
        server = start_engine(settings.engine, folder, Version(1, 0), Path(logs) / "engine.log")
        try:
            await server.wait_ready()
            client = server.client()
            endpoint = Endpoint(client, template, settings.endpoint, public=True)
            try:
                print(f"{folder} is served at {await endpoint.start()}/v1", flush=True)
                while not ended.is_set():
                    if (code := server.child.poll()) is not None:
                        raise EngineLost(f"the engine ended with code {code}:\n{server.child.tail()}")
                    await asyncio.sleep(0.2)
            finally:
                await endpoint.stop()
                await client.close()
        finally:
            await server.stop()


def run_serve(folder: Path, port: int, overrides: Sequence[str]) -> None:
    """The command's work; ConfigError for settings that cannot be."""
    settings = load(Settings, None, [f"endpoint.port={port}", *overrides])
    asyncio.run(serve(folder.absolute(), settings))
