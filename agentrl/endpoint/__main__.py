"""`python -m agentrl.endpoint FOLDER --port 30000`: a model folder behind an OpenAI-compatible URL, for any client.

Starts an engine server of its own and serves until SIGINT or SIGTERM. `engine.*` and `endpoint.*` are a run's settings.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from agentrl.config import load
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import start_engine
from agentrl.errors import AgentRLError, EngineLost
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


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.endpoint", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE")
    args = parser.parse_intermixed_args()
    try:
        settings = load(Settings, None, [f"endpoint.port={args.port}", *args.settings])
        asyncio.run(serve(args.folder.absolute(), settings))
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
