"""Listening: `agentrl view`, and the process that `agentrl train` starts for its own page."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web

from agentrl.errors import AgentRLError, ConfigError
from agentrl.monitor.app import make_app
from agentrl.monitor.runs import Run

TOKEN_VARIABLE = "AGENTRL_PAGE_TOKEN"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def page_url(host: str, port: int, token: str | None) -> str:
    """What to open."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


async def serve(
    paths: Sequence[Path],
    *,
    host: str,
    port: int,
    token: str | None,
    on_ready: Callable[[str], None],
    stop: asyncio.Event,
    kept: bool = False,
) -> None:
    """Serve the runs in `paths` until `stop` is set. ConfigError where a folder is none, or the port is taken.

    With `kept` the port is one that another process of ours keeps for this one (SO_REUSEPORT).
    """
    runs = [Run(path) for path in paths]
    runner = web.AppRunner(make_app(runs, token), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=256, reuse_port=kept or None).start()
        except OSError as error:
            raise ConfigError(
                f"the page cannot listen on {host}:{port}: {error.strerror or error}; choose another port, or 0 for "
                "any free one"
            ) from error
        on_ready(page_url(host, runner.addresses[0][1], token))
        await stop.wait()
    finally:
        await runner.cleanup()
        for run in runs:
            run.close()


def view(paths: Sequence[Path], *, host: str, port: int, kept: bool = False) -> None:
    """`agentrl view`: serve until interrupted."""
    token = None if is_loopback(host) else os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(18)
    asyncio.run(_until_signal(paths, host, port, token, kept))


async def _until_signal(paths: Sequence[Path], host: str, port: int, token: str | None, kept: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await serve(paths, host=host, port=port, token=token, on_ready=_tell, stop=stop, kept=kept)


def _tell(url: str) -> None:
    print(url, flush=True)


def main() -> int:
    """`python -m agentrl.monitor.serve RUN… --host H --port P`; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--kept", action="store_true", help="whoever starts this keeps the port for it")
    given = parser.parse_args()
    try:
        view(given.runs, host=given.host, port=given.port, kept=given.kept)
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
