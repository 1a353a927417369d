"""Engines on other hosts: whoever joins gets the current weights and, that proved, serves; who is lost is left out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from agentrl.cluster.beats import Member, MemberGone, while_there
from agentrl.cluster.hub import Hub
from agentrl.cluster.protocol import Drop, EngineTask, Fetch, Source
from agentrl.cluster.spread import spread
from agentrl.conductor.desk import Desk
from agentrl.conductor.engines import ASK_EVERY, CALM_SECONDS, FENCED_SECONDS, counters_of
from agentrl.conductor.watchdog import Standstill, Wait
from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.router import PublishReport, Router
from agentrl.engine.server import decoder
from agentrl.engine.weights import model_limits
from agentrl.errors import DeadlineExceeded, EngineError, EngineLost, RunError
from agentrl.types import Version

_TICK = 0.2
_LOCAL_ONLY = {"count", "host", "port", "gpus"}
"""Settings of the engines' own machine; a worker has one engine, on loopback."""
Stage = Callable[[str, Path, Version], Awaitable[str]]


def weights_name(version: Version) -> str:
    """The name under which a version's weights travel; a label never names two sets of weights."""
    return f"weights-{version}"


class WorkerEngine(EngineClient):
    """An engine behind its worker's door: weights are fetched by the worker before they are loaded."""

    def __init__(self, address: str, token: str, model_dir: Path, options: EngineOptions, stage: Stage) -> None:
        super().__init__(
            f"{address}/engine",
            limits=model_limits(model_dir, options.context_length),
            model_dir=model_dir,
            decode=decoder(model_dir),
            load_timeout=options.load_timeout,
            token=token,
            hot_swap=options.hot_swap,
        )
        self.address = address
        self._stage = stage

    async def update_from_disk(self, path: Path | str, version: Version) -> None:
        """Have the worker fetch the weights, then the engine load them."""
        self._check_weights(Path(path))
        await self._load(await self._stage(self.address, Path(path), version), version)


class _Key(NamedTuple):
    """One start of an engine."""

    lease: str
    generation: int


class _Seat(NamedTuple):
    member: Member
    client: WorkerEngine


class RemoteFleet:
    """The same calls as `Fleet`, over the engine workers of `hub`. `bring` makes new weights lie on this host."""

    def __init__(
        self,
        options: EngineOptions,
        model_dir: Path,
        desk: Desk,
        hub: Hub,
        *,
        restarts: int,
        silent_seconds: float,
        bring: Callable[[Path, Version], Awaitable[None]],
    ) -> None:
        self._options, self._model_dir, self._desk, self._hub = options, model_dir, desk, hub
        self._restarts, self._silent_seconds, self._bring = restarts, silent_seconds, bring
        self._model = Source(name=f"model-{hub.nonce}", urls=())
        self._seats: dict[_Key, _Seat] = {}
        self._admitting: set[_Key] = set()
        self._retiring: set[str] = set()
        self._aside: set[str] = set()
        self._faults: dict[str, list[float]] = {}
        self._heard: dict[_Key, float] = {}
        self._fenced_since: dict[_Key, float] = {}
        self._current: tuple[Path, Version] | None = None
        self._router: Router | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()
        self._failure: BaseException | None = None
        self._clients: list[WorkerEngine] = []
        self.deaths = 0

    @property
    def router(self) -> Router:
        """The engines as one; only after `start`."""
        if self._router is None:
            raise RunError("the engines are not started yet")
        return self._router

    async def start(self, model_dir: Path, version: Version) -> Router:
        """Wait until as many engines as `engine.count` hold the weights in `model_dir`; more may join at any time."""
        self._hub.shelf.put(self._model.name, self._model_dir)
        self._model = self._model.model_copy(update={"urls": (self._hub.url,)})
        self._current = (model_dir, version)
        deadline = time.monotonic() + self._hub.options.wait_seconds + self._options.startup_timeout
        while len(self._seats) < self._options.count:
            self._tick()
            if time.monotonic() > deadline:
                raise RunError(self._too_few())
            await asyncio.sleep(_TICK)
        clients = [seat.client for seat in self._seats.values()]
        self._router = Router(clients, current=self._current, slow_seconds=self._hub.options.slow_seconds)
        return self._router

    def _too_few(self) -> str:
        there = len(self._hub.members("engine"))
        return (
            f"{self._options.count} engines are wanted (engine.count), {there} workers joined and {len(self._seats)} "
            f"serve; start more: agentrl worker --role engine --conductor {self._hub.url}"
        )

    async def run(self) -> None:
        """Seat who comes, leave out who goes, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep())
                group.create_task(self._listen())
        finally:
            for task in list(self._tasks):
                task.cancel()

    async def publish(self, path: Path, version: Version) -> PublishReport:
        """Bring the weights to every host that serves, then change them in all engines at once."""
        await self._bring(path, version)
        name = weights_name(version)
        self._hub.shelf.put(name, path)
        serving = set(self.router.serving)
        hosts = {s.client.address: s.member for s in self._seats.values() if s.client.url in serving}

        async def fetch(target: str, sources: Sequence[str]) -> None:
            await while_there(hosts[target], self._fetch(target, name, sources))

        options = self._hub.options
        failed = await spread(self._hub.url, list(hosts), fetch, fanout=options.fanout, seconds=options.slow_seconds)
        for address, reason in failed.items():
            # Left out of what follows; it catches up by itself, and serves again when it has.
            self.router.fence(f"{address}/engine", f"it did not fetch weights {version}: {reason}")
        report = await self.router.publish(path, version)
        self._current = (path, version)
        self._forget(name)
        return report._replace(failed={**report.failed, **failed})

    async def serving(self) -> None:
        """Wait until an engine serves; RunError where none comes in time."""
        deadline = time.monotonic() + self._hub.options.wait_seconds + self._options.startup_timeout
        while not self.router.serving:
            if time.monotonic() > deadline:
                raise RunError(f"no engine has served for long; {self._too_few()}")
            await asyncio.sleep(0.1)

    async def counters(self) -> list[dict[str, Any]]:
        """Each serving engine's own counters; one that does not answer is left out."""
        return await counters_of([seat.client for seat in self._seats.values()])

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        if self._router is None:
            return [Wait("the conductor", f"engines: {self._too_few()}", time.monotonic() - self._began)]
        return [Wait(f"engine {url}", f"recovery ({why})", 0.0) for url, why in self._router.fenced.items()]

    async def stop(self) -> None:
        """Close the connections; the workers are told by the hub."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._router is not None:
            await self._router.close()
        # Also those that left: a question that was under way may have opened a connection again.
        await asyncio.gather(*(client.close() for client in self._clients))

    # --- who comes and goes

    async def _keep(self) -> None:
        standstill = Standstill()
        while True:
            if stood := standstill.seconds(_TICK):
                now = time.monotonic()
                self._heard = {key: min(heard + stood, now) for key, heard in self._heard.items()}
            self._tick()
            await asyncio.sleep(_TICK)

    def _tick(self) -> None:
        if self._failure is not None:
            raise self._failure
        for key, seat in list(self._seats.items()):
            task = seat.member.task
            if seat.member.gone or task is None or task.generation != key.generation:
                self._retire(key, seat.member.gone or "its engine ended")
        for member in self._hub.members("engine"):
            if member.task is None:
                if member.lease not in self._aside:
                    self._order(member)
            elif member.on_task and member.beat.state == "ended":
                self._fault(member, member.beat.text)
            elif member.on_task and member.beat.state == "running":
                key = _Key(member.lease, member.task.generation)
                if key in self._seats:
                    if self._router is not None and (why := self._hangs(key)):
                        self._fault(member, f"{member.name} {why}")
                elif key not in self._admitting and member.join.address not in self._retiring:
                    self._admitting.add(key)
                    self._spawn(self._admit(member, key))

    def _order(self, member: Member) -> None:
        options = self._options.model_dump(mode="json", exclude_unset=True, exclude=_LOCAL_ONLY)
        generation = self._hub.generation()
        # Whoever serves has the model too: the conductor's link is not asked by everybody who joins.
        holders = [seat.client.address for seat in self._seats.values() if not seat.member.gone]
        near = (holders[generation % len(holders)],) if holders else ()
        model = self._model.model_copy(update={"urls": (*near, *self._model.urls)})
        member.task = EngineTask(generation=generation, options=options, model=model)

    async def _admit(self, member: Member, key: _Key) -> None:
        assert self._current is not None
        client = WorkerEngine(member.join.address, self._hub.token, self._model_dir, self._options, self._stage)
        self._clients.append(client)
        try:
            if self._router is None:
                await while_there(member, client.update_from_disk(*self._current))
            else:
                await while_there(member, self._router.add(client))
                self._desk.note(
                    f"{member.name} serves, with the weights {self._router.current and self._router.current[1]}"
                )
            self._seats[key] = _Seat(member, client)
        except (EngineError, DeadlineExceeded, MemberGone) as error:
            await client.close()
            if not member.gone:
                self._fault(member, f"{member.name} cannot serve: {error}")
        except asyncio.CancelledError:
            await client.close()
            raise
        finally:
            self._admitting.discard(key)

    def _retire(self, key: _Key, reason: str) -> None:
        seat = self._seats.pop(key)
        self._heard.pop(key, None)
        self._fenced_since.pop(key, None)
        self._retiring.add(seat.client.address)
        if seat.member.gone:
            self.deaths += 1
            self._desk.metrics.write("fault", {"what": seat.member.name, "code": None, "error": reason})
        if self._router is not None:
            self._router.fence(seat.client.url, reason)
        self._spawn(self._remove(seat))

    async def _remove(self, seat: _Seat) -> None:
        try:
            if self._router is not None:
                await self._router.remove(seat.client.url)
            else:
                await seat.client.close()
        finally:
            self._retiring.discard(seat.client.address)

    def _fault(self, member: Member, text: str) -> None:
        """Start it again, as a new generation; set a host aside where that does not help."""
        self.deaths += 1
        self._desk.log.error("%s", text)
        self._desk.metrics.write("fault", {"what": member.name, "code": member.beat.code, "error": text[:2000]})
        now = time.monotonic()
        faults = [at for at in self._faults.get(member.lease, ()) if now - at < CALM_SECONDS] + [now]
        self._faults[member.lease] = faults
        first = text.partition("\n")[0]
        if len(faults) <= self._restarts:
            self._desk.note(f"{first}; it is started again with the current weights")
            self._order(member)
            return
        if not (self._router is not None and self._router.serving):
            raise RunError(f"{text}\n{member.name}: it failed {len(faults)} times within {CALM_SECONDS:.0f} s")
        self._desk.note(f"{first}; it failed {len(faults)} times and is set aside")
        self._aside.add(member.lease)
        member.task = None

    def _hangs(self, key: _Key) -> str:
        """Why an engine is to be started again although its worker is well; empty while all is."""
        now = time.monotonic()
        url = self._seats[key].client.url
        silence = now - self._heard.setdefault(key, now)
        if silence > self._silent_seconds:
            return f"has an engine that has not answered for {silence:.0f} s"
        if silence > self._hub.options.lost_seconds and url in self.router.serving:
            self.router.fence(url, f"no answer for {silence:.0f} s")
        if url not in self.router.fenced:
            self._fenced_since.pop(key, None)
        elif now - self._fenced_since.setdefault(key, now) > FENCED_SECONDS + self._options.load_timeout:
            return "has an engine that serves nothing"
        return ""

    async def _listen(self) -> None:
        while True:
            await asyncio.gather(*(self._ask(key, seat) for key, seat in list(self._seats.items())))
            await asyncio.sleep(ASK_EVERY)

    async def _ask(self, key: _Key, seat: _Seat) -> None:
        try:
            async with asyncio.timeout(self._hub.options.lost_seconds / 2):
                await seat.client.model_info()
        except (EngineError, DeadlineExceeded, TimeoutError):
            return
        self._heard[key] = time.monotonic()

    # --- weights on their way

    async def _stage(self, address: str, path: Path, version: Version) -> str:
        name = weights_name(version)
        self._hub.shelf.put(name, path)
        await self._fetch(address, name, [self._hub.url])
        return name

    async def _fetch(self, address: str, name: str, sources: Sequence[str]) -> None:
        body = Fetch(source=Source(name=name, urls=tuple(sources))).model_dump_json()
        seconds = self._options.load_timeout
        try:
            async with self._hub.http.post(
                f"{address}/fetch", data=body, timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=5.0)
            ) as response:
                if response.status != 200:
                    raise EngineError(f"{address} did not fetch {name}: {(await response.text())[:500]}")
        except TimeoutError as error:
            raise DeadlineExceeded(f"{address} did not fetch {name} within {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineLost(f"{address} cannot be reached: {error!r}") from error

    def _forget(self, current: str) -> None:
        """Older weights are of no use to anybody."""
        names = [n for n in self._hub.shelf.names() if n.startswith("weights-") and n != current]
        for name in names:
            self._hub.shelf.drop(name)
        if names:
            for member in self._hub.members("engine"):
                self._spawn(drop(self._hub, member, names))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error


async def drop(hub: Hub, member: Member, names: Sequence[str]) -> None:
    """Tell a worker that it need not keep these folders; one that does not hear it loses only disk."""
    body = Drop(names=tuple(names)).model_dump_json()
    with suppress(aiohttp.ClientError, TimeoutError):
        async with hub.http.post(f"{member.join.address}/drop", data=body, timeout=aiohttp.ClientTimeout(total=10.0)):
            pass
