"""`agentrl worker`: one process on a host that runs what the conductor wants, and ends it when nobody answers.

    join ──> beat every second ──> orders: the task that is wanted ──> start it, end what is not wanted
      ^__________ the lease is over, or nobody answered for two thirds of the time after which a worker is lost

The second half of that rule is a fence: before the conductor gives this worker's work to another one, this one has
ended it, also where its link was cut or its host frozen.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp import web

from agentrl import __version__
from agentrl.cluster.files import Shelf, answer, guard, open_http, read_token
from agentrl.cluster.protocol import (
    BEAT_SECONDS,
    IDLE_BEAT_SECONDS,
    Beat,
    EngineTask,
    Join,
    Joined,
    Leave,
    Orders,
    Role,
    Task,
    TrainerTask,
    Welcome,
)
from agentrl.cluster.store import Store
from agentrl.cluster.tasks import EngineRun, RolloutRun, Run, TrainerRun
from agentrl.cluster.warm import WarmRanks
from agentrl.errors import ConfigError, InfrastructureError

ASK_SECONDS = 2.0
"""A beat that is not answered in this time, or a quarter of the fence's if that is longer, is sent again."""


@dataclass(frozen=True)
class WorkerOptions:
    """How a worker is started."""

    role: Role
    conductor: str
    """The conductor's URL."""
    token: str
    host: str = ""
    """The address that others reach this host by; the one that faces the conductor where empty."""
    port: int = 0
    scratch: Path | None = None
    """A folder for models, weights and logs; a temporary one where None."""
    name: str = ""
    slots: int = 1
    patience: float = 600.0
    """Seconds without a conductor after which it gives up."""


def worker_options(
    role: str,
    conductor: str,
    token_file: Path | None,
    *,
    host: str,
    port: int,
    slots: int,
    scratch: Path | None,
    name: str,
    patience: float,
) -> WorkerOptions:
    """Options of a command line; ConfigError where they cannot be."""
    known: dict[str, Role] = {"engine": "engine", "trainer": "trainer", "rollout": "rollout"}
    if role not in known:
        raise ConfigError(f"--role {role!r}: expected one of {', '.join(known)}")
    if slots != 1 and role != "trainer":
        raise ConfigError(f"--ranks has no effect with --role {role}: only trainers have ranks")
    return WorkerOptions(
        known[role],
        conductor,
        read_token(token_file),
        host,
        port,
        scratch and scratch.absolute(),
        name,
        slots,
        patience,
    )


class LeaseOver(InfrastructureError):
    """The conductor knows this lease no longer, or does not answer."""


def run_worker(options: WorkerOptions) -> int:
    """Work until the run is over or a signal comes; the exit code. ConfigError where it can never work."""
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="agentrl-worker-"))
    scratch.mkdir(parents=True, exist_ok=True)

    logging.basicConfig(format="agentrl worker: %(message)s", stream=sys.stderr)
    logging.getLogger(__name__).setLevel(logging.INFO)

    async def work() -> int:
        worker = Worker(options, scratch)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, worker.stop)
        return await worker.run()

    try:
        return asyncio.run(work())
    finally:
        if options.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)


class Worker:
    """See the module."""

    def __init__(
        self,
        options: WorkerOptions,
        scratch: Path,
        make_engine: type[EngineRun] = EngineRun,
    ) -> None:
        """`make_engine` runs an engine's task: with another class than `EngineRun`, another kind of engine."""
        self._options, self._make_engine = options, make_engine
        self._conductor = options.conductor.rstrip("/")
        self._host = options.host or _facing(self._conductor)
        self._scratch = scratch
        self.shelf = Shelf(self._find)
        self._over = asyncio.Event()
        self._changed = asyncio.Event()
        self._run: Run | None = None
        self._warm = WarmRanks(options.slots, scratch)
        self._good_until = 0.0
        self._address = self._beats = ""
        self._store: Store | None = None

    async def run(self) -> int:
        """Join, beat and obey."""
        async with open_http(self._options.token) as http, aiohttp.ClientSession() as local:
            self._http, self._local = http, local
            self._store = Store(http, self.shelf, self._scratch)
            runner = await self._listen()
            self._warm_up()
            try:
                await self._until_over()
            finally:
                self._over.set()
                await self._end()
                await self._warm.close()
                await runner.cleanup()
        return 0

    @property
    def work(self) -> Run | None:
        """What it runs now."""
        return self._run

    def stop(self) -> None:
        """Leave the run: end what runs, say so, and return from `run`."""
        self._over.set()

    async def _until_over(self) -> None:
        asked_since = time.monotonic()
        told = ""
        while not self._over.is_set():
            try:
                joined, welcome = await self._join()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # also another server's answer
                if time.monotonic() - asked_since > self._options.patience:
                    raise ConfigError(
                        f"no conductor at {self._conductor} for {self._options.patience:.0f} s ({error}); is it "
                        "started, with cluster.host and cluster.port, and are they reached from here?"
                    ) from error
                if str(error) != told:
                    told = str(error)
                    _say(f"waits for a conductor at {self._conductor} ({error})")
                await self._pause(1.0)
                continue
            _say(f"joined run {welcome.run!r} as {joined.lease}")
            self._beats = f"http://{urlsplit(self._conductor).hostname}:{joined.beats}/beat"
            try:
                await self._work(joined.lease, welcome)
            except LeaseOver as error:
                _say(f"{error}; it ends what it runs and joins again")
            finally:
                await self._end()
            asked_since = time.monotonic()

    # --- the lease

    async def _join(self) -> tuple[Joined, Welcome]:
        async with self._http.get(f"{self._conductor}/cluster/", timeout=_total(10.0)) as response:
            if response.status == 401:
                raise ConfigError(f"{self._conductor} refused the token: it is not that of the conductor's cluster")
            response.raise_for_status()
            body = orjson.loads(await response.read())
        if body.get("version") != __version__:
            raise ConfigError(f"this worker has agentrl {__version__}, the conductor {body.get('version')}: same it")
        welcome = Welcome.model_validate(body)
        probe = await asyncio.to_thread(_read, welcome.probe)
        join = Join(
            role=self._options.role,
            address=self._address,
            host=self._host,
            name=self._options.name or f"{socket.gethostname()}:{os.getpid()}",
            slots=self._options.slots,
            version=__version__,
            probe=probe,
        )
        async with self._http.post(
            f"{self._conductor}/cluster/join", data=join.model_dump_json(), timeout=_total(10.0)
        ) as response:
            answered = orjson.loads(await response.read())
            if response.status == 409:
                raise ConfigError(str(answered["error"]))
            response.raise_for_status()
        return Joined.model_validate(answered), welcome

    async def _work(self, lease: str, welcome: Welcome) -> None:
        fence = welcome.lost_seconds * 2 / 3
        patience = max(ASK_SECONDS, fence / 4)
        self._good_until = time.monotonic() + fence
        while not self._over.is_set():
            sent = time.monotonic()
            # First of all after a freeze: what ran must not go on.
            if sent > self._good_until:
                raise LeaseOver(f"the conductor has not answered for {fence:.1f} s")
            with suppress(aiohttp.ClientError, TimeoutError):
                orders = await self._beat(lease, patience)
                self._good_until = sent + fence
                await self._obey(lease, orders)
            self._changed.clear()
            await self._pause(BEAT_SECONDS if self._run is not None else IDLE_BEAT_SECONDS)
        with suppress(aiohttp.ClientError, TimeoutError):
            leaving = Leave(lease=lease).model_dump_json()
            async with self._http.post(f"{self._conductor}/cluster/leave", data=leaving, timeout=_total(ASK_SECONDS)):
                pass

    async def _beat(self, lease: str, seconds: float) -> Orders:
        run = self._run
        beat = Beat(lease=lease, port=_free_port(self._host))
        if run is not None:
            beat = beat.model_copy(
                update={
                    "generation": run.task.generation,
                    "state": run.state,
                    "code": run.code,
                    "text": run.text[-4000:],
                }
            )
        async with self._http.post(self._beats, data=beat.model_dump_json(), timeout=_total(seconds)) as response:
            body = await response.read()
            if response.status != 200:
                raise LeaseOver(f"the conductor answered {response.status}: {body[:200].decode(errors='replace')}")
            return Orders.model_validate_json(body)

    async def _obey(self, lease: str, orders: Orders) -> None:
        wanted = orders.task
        if self._run is not None and (wanted is None or wanted.generation != self._run.task.generation):
            await self._end()
        if wanted is not None and self._run is None:
            self._run = self._start(lease, wanted)

    def _start(self, lease: str, task: Task) -> Run:
        assert self._store is not None
        _say(f"starts {task.kind}, generation {task.generation}")
        if isinstance(task, EngineTask):
            return self._make_engine(task, self._store, self._scratch, self._changed)
        if isinstance(task, TrainerTask):
            return TrainerRun(task, self._store, self._scratch, self._changed, self._conductor, self._host, self._warm)
        return RolloutRun(task, self._store, self._scratch, self._changed, self._conductor, self._options.token, lease)

    async def _end(self) -> None:
        if (run := self._run) is not None:
            self._run = None
            await run.end()
            self._warm_up()

    def _warm_up(self) -> None:
        if self._options.role == "trainer" and not self._over.is_set():
            self._warm.fill()

    async def _pause(self, seconds: float) -> None:
        over, changed = asyncio.ensure_future(self._over.wait()), asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((over, changed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            changed.cancel()

    # --- the server

    async def _listen(self) -> web.AppRunner:
        files = web.Application(middlewares=[guard(self._options.token)])
        files.add_routes(self.shelf.routes())
        app = web.Application(middlewares=[guard(self._options.token)], client_max_size=256 << 20)
        assert self._store is not None
        app.add_routes(
            [
                web.post("/fetch", self._store.on_fetch),
                web.post("/drop", self._store.on_drop),
                web.post("/stop", self._on_stop),
                web.route("*", "/engine/{path:.*}", self._on_engine),
            ]
        )
        app.add_subapp("/files", files)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._options.port, backlog=4096).start()
        except OSError as error:
            raise ConfigError(
                f"--host {self._host} --port {self._options.port}: {error.strerror}; give an address of this host in "
                "the cluster's private network"
            ) from error
        self._address = f"http://{self._host}:{runner.addresses[0][1]}"
        return runner

    def _find(self, name: str) -> Path | None:
        return self._run.find(name) if isinstance(self._run, TrainerRun) else None

    async def _on_stop(self, request: web.Request) -> web.StreamResponse:
        self._over.set()
        return answer(200, {})

    async def _on_engine(self, request: web.Request) -> web.StreamResponse:
        """The engine itself listens on loopback alone: this is its door, and it is closed when the lease is over."""
        if not isinstance(self._run, EngineRun) or time.monotonic() > self._good_until:
            return _hang_up(request)
        return await self._run.forward(self._local, request)


def _hang_up(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)


def _total(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _read(path: str | None) -> str | None:
    try:
        return None if path is None else Path(path).read_text()
    except OSError:
        return None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _facing(conductor: str) -> str:
    """This host's address on the way to the conductor; ConfigError where that is a public one."""
    url = urlsplit(conductor)
    if url.scheme != "http" or url.hostname is None:
        raise ConfigError(f"--conductor {conductor!r}: expected http://ADDRESS:PORT")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((url.hostname, url.port or 80))
        except OSError as error:
            raise ConfigError(f"--conductor {conductor!r} cannot be reached: {error.strerror or error}") from error
        found = str(probe.getsockname()[0])
    if not ipaddress.ip_address(found).is_private:
        raise ConfigError(
            f"this host's way to the conductor is by {found}, a public address: say --host if you mean it"
        )
    return found


def _say(text: str) -> None:
    logging.getLogger(__name__).info(text)
