"""The run's engine servers: started together, started again where one dies or hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.conductor.cause import death, remedy
from agentrl.conductor.desk import Desk
from agentrl.conductor.watchdog import Standstill, Wait
from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.router import PublishReport, Router
from agentrl.engine.server import EngineServer, start_engine
from agentrl.errors import DeadlineExceeded, EngineError, RunError
from agentrl.types import Version

MEMORY = "lower engine.max_running, engine.context_length or engine.memory_fraction"
FENCED_SECONDS = 60.0
"""An engine that has served nothing for so long, while its process lives, is ended and started again."""
CALM_SECONDS = 60.0
"""Restarts are counted over so long."""
ASK_EVERY = 1.0
ASK_SECONDS = 5.0
COUNTERS_SECONDS = 1.0
UNPUBLISHED = Version(0, 0)
"""The label of a restarted server until the router has given it the current weights."""


class Fleet:
    """`router` speaks to all of them; `run` keeps them alive."""

    def __init__(
        self,
        options: EngineOptions,
        model_dir: Path,
        desk: Desk,
        *,
        restarts: int = 3,
        silent_seconds: float = 90.0,
        name: str = "engine",
    ) -> None:
        """`name` is what logs and faults call each of them, with its number."""
        self._options = options
        self._name = name
        self._restarts = restarts
        self._silent_seconds = silent_seconds
        self._model_dir = model_dir
        self._desk = desk
        self._servers: list[EngineServer] = []
        self._watchers: dict[str, EngineClient] = {}
        self._starts: list[list[float]] = [[] for _ in range(options.count)]
        self._seated: set[str] = set()
        self._fenced_since: dict[str, float] = {}
        self._heard: dict[str, float] = {}
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
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_alive())
            group.create_task(self._listen())

    async def _listen(self) -> None:
        """Ask each for a sign of life: a stopped process keeps its connections, and nothing else would notice."""
        while True:
            await asyncio.gather(*(self._ask(server) for server in list(self._servers)))
            await asyncio.sleep(ASK_EVERY)

    async def _ask(self, server: EngineServer) -> None:
        try:
            await self._watcher(server.url).model_info()
        except (EngineError, DeadlineExceeded):
            return
        self._heard[server.url] = time.monotonic()

    def _watcher(self, url: str) -> EngineClient:
        if url not in self._watchers:
            self._watchers[url] = EngineClient(url, control_timeout=ASK_SECONDS)
        return self._watchers[url]

    async def _keep_alive(self) -> None:
        while True:
            standstill = Standstill()
            await asyncio.sleep(0.5)
            if stood := standstill.seconds(0.5):
                now = time.monotonic()
                self._heard = {url: min(heard + stood, now) for url, heard in self._heard.items()}
            for index, server in enumerate(self._servers):
                code = server.child.poll()
                if code is None and (silence := self._hangs(server.url)):
                    self._desk.note(f"{server.child.name} {silence}: it is ended")
                    server.child.kill()
                    code = await server.child.wait()
                if code is not None:
                    await self._restart(index, server, code)

    async def publish(self, path: Path, version: Version) -> PublishReport:
        """Change the weights of all engines that serve."""
        return await self.router.publish(path, version)

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
        return await counters_of([self._watcher(server.url) for server in self._servers])

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
        for client in list(self._watchers.values()):
            await client.close()
        if self._router is not None:
            await self._router.close()
        await asyncio.gather(*(server.stop() for server in self._servers))

    def _log(self, index: int) -> Path:
        return self._desk.folder.logs / f"{self._name}-{index}.log"

    def _hangs(self, url: str) -> str:
        """Why it is to be ended; empty while all is well."""
        now = time.monotonic()
        if now - self._heard.setdefault(url, now) > self._silent_seconds:
            return f"has not answered for {self._silent_seconds:.0f} s"
        if url not in self.router.fenced:
            self._fenced_since.pop(url, None)
        elif now - self._fenced_since.setdefault(url, now) > FENCED_SECONDS:
            return f"has served nothing for {FENCED_SECONDS:.0f} s"
        return ""

    async def _restart(self, index: int, server: EngineServer, code: int) -> None:
        self.deaths += 1
        text = death(server.child, code)
        self._desk.log.error("%s", text)
        self._desk.metrics.write("fault", {"what": f"{self._name} {index}", "code": code, "error": text[:2000]})
        now = time.monotonic()
        starts = self._starts[index] = [at for at in self._starts[index] if now - at < CALM_SECONDS] + [now]
        if len(starts) > self._restarts:
            raise RunError(
                f"{text}\nit died {len(starts)} times within {CALM_SECONDS:.0f} s\n"
                f"what to do: {remedy(text, MEMORY)} (all of it is in {self._log(index)}), then go on with --resume"
            )
        self._desk.note(f"{text.partition(chr(10))[0]}; it is started again with the current weights")
        server.child.kill()
        self._fenced_since.pop(server.url, None)
        self._heard.pop(server.url, None)
        if (watcher := self._watchers.pop(server.url, None)) is not None:
            await watcher.close()
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


async def counters_of(clients: Sequence[EngineClient]) -> list[dict[str, Any]]:
    """Each engine's own counters; one that does not answer within a second is left out. A publish waits for this."""

    async def one(client: EngineClient) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(COUNTERS_SECONDS):
                return await client.counters()
        except (EngineError, DeadlineExceeded, TimeoutError):
            return None

    return [found for found in await asyncio.gather(*map(one, clients)) if found is not None]
