"""The run's engine servers: started together, started again where one dies or hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.conductor.desk import Desk
from agentrl.conductor.trainer import death
from agentrl.conductor.watchdog import Wait
from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.router import Router
from agentrl.engine.server import EngineServer, start_engine
from agentrl.errors import DeadlineExceeded, EngineError, RunError
from agentrl.types import Version

FENCED_SECONDS = 60.0
"""An engine that has served nothing for so long, while its process lives, is ended and started again."""
RESTARTS = 3
"""How often one engine may die within `CALM_SECONDS` of its last start before the run ends."""
CALM_SECONDS = 60.0
UNPUBLISHED = Version(0, 0)
"""The label of a restarted server until the router has given it the current weights."""


class Fleet:
    """`router` speaks to all of them; `run` keeps them alive."""

    def __init__(self, options: EngineOptions, model_dir: Path, desk: Desk) -> None:
        self._options = options
        self._model_dir = model_dir
        self._desk = desk
        self._servers: list[EngineServer] = []
        self._watchers: dict[str, EngineClient] = {}
        self._starts: list[list[float]] = [[] for _ in range(options.count)]
        self._seated: set[str] = set()
        self._fenced_since: dict[str, float] = {}
        self._router: Router | None = None
        self.deaths = 0

    @property
    def router(self) -> Router:
        """The engines as one; only after `start`."""
        if self._router is None:
            raise RunError("the engines are not started yet")
        return self._router

    async def start(self, model_dir: Path, version: Version) -> Router:
        """Start all servers on the weights in `model_dir`, labelled `version`, and wait until they serve."""
        for index in range(self._options.count):
            log = self._log(index)
            server = await asyncio.to_thread(start_engine, self._options, model_dir, version, log, index)
            self._servers.append(server)
            self._starts[index].append(time.monotonic())
        try:
            await asyncio.gather(*(server.wait_ready() for server in self._servers))
        except (EngineError, DeadlineExceeded) as error:
            raise RunError(
                f"{error}\nwhat to do: see logs/engine-*.log; check engine.* and the model folder"
            ) from error
        for server in self._servers:
            # Clients read the model's limits and shapes again and again; a checkpoint's folder does not stay for ever.
            server.model_dir = self._model_dir
        self._seated = {server.url for server in self._servers}
        self._router = Router([s.client() for s in self._servers], current=(model_dir, version))
        return self._router

    async def run(self) -> None:
        """Watch them until cancelled; RunError where one cannot be kept alive."""
        while True:
            await asyncio.sleep(0.5)
            for index, server in enumerate(self._servers):
                code = server.child.poll()
                if code is None and self._hangs(server.url):
                    self._desk.note(f"{server.child.name} has served nothing for {FENCED_SECONDS:.0f} s: it is ended")
                    server.child.kill()
                    code = await server.child.wait()
                if code is not None:
                    await self._restart(index, server, code)

    async def serving(self) -> None:
        """Wait until an engine serves; RunError where none comes back in time."""
        deadline = time.monotonic() + self._options.startup_timeout + FENCED_SECONDS
        while len(fenced := self.router.fenced) >= self._options.count:
            if time.monotonic() > deadline:
                reasons = "; ".join(f"{url}: {why}" for url, why in fenced.items())
                raise RunError(
                    f"no engine has served for {self._options.startup_timeout + FENCED_SECONDS:.0f} s: {reasons}"
                )
            await asyncio.sleep(0.1)

    async def counters(self) -> list[dict[str, Any]]:
        """Each live engine's own counters; an engine that does not answer is left out."""
        found = []
        for server in self._servers:
            if server.url not in self._watchers:
                self._watchers[server.url] = EngineClient(server.url, control_timeout=1.0)
            try:
                found.append(await self._watchers[server.url].counters())
            except (EngineError, DeadlineExceeded):
                continue
        return found

    def waits(self) -> Sequence[Wait]:
        """For the watchdog: engines that serve nothing."""
        if self._router is None:
            return [Wait("the conductor", "the engines to start", 0.0)]
        now = time.monotonic()
        return [
            Wait(f"engine {url}", f"recovery ({reason})", now - self._fenced_since.get(url, now))
            for url, reason in self._router.fenced.items()
        ]

    async def stop(self) -> None:
        """End all of them."""
        for client in self._watchers.values():
            await client.close()
        if self._router is not None:
            await self._router.close()
        await asyncio.gather(*(server.stop() for server in self._servers))

    def _log(self, index: int) -> Path:
        return self._desk.folder.logs / f"engine-{index}.log"

    def _hangs(self, url: str) -> bool:
        if url not in self.router.fenced:
            self._fenced_since.pop(url, None)
            return False
        return time.monotonic() - self._fenced_since.setdefault(url, time.monotonic()) > FENCED_SECONDS

    async def _restart(self, index: int, server: EngineServer, code: int) -> None:
        self.deaths += 1
        text = death(server.child, code)
        self._desk.log.error("%s", text)
        self._desk.metrics.write("fault", {"what": f"engine {index}", "code": code, "error": text[:2000]})
        now = time.monotonic()
        starts = self._starts[index] = [at for at in self._starts[index] if now - at < CALM_SECONDS] + [now]
        if len(starts) > RESTARTS:
            raise RunError(f"{text}\nit died {len(starts)} times within {CALM_SECONDS:.0f} s: see {self._log(index)}")
        self._desk.note(f"{text.partition(chr(10))[0]}; it is started again with the current weights")
        server.child.kill()
        self._fenced_since.pop(server.url, None)
        fresh = await asyncio.to_thread(
            start_engine, self._options, self._model_dir, UNPUBLISHED, self._log(index), index
        )
        self._servers[index] = fresh
        try:
            await fresh.wait_ready()
            # The new one is in before the old one is out: a router without any engine has nobody to ask.
            await self.router.add(fresh.client())
            self._seated.add(fresh.url)
            if server.url in self._seated:
                self._seated.discard(server.url)
                await self.router.remove(server.url)
        except (EngineError, DeadlineExceeded) as error:
            # Its process is dead or will be found fenced: the next round starts it again, within the same limit.
            self._desk.note(f"{fresh.child.name} did not come back: {str(error).partition(chr(10))[0]}")
            fresh.child.kill()
