"""What a worker runs for a task: an engine server, ranks of a trainer's group, or episodes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import struct
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from agentrl.child import LOGS_VARIABLE, Child
from agentrl.cluster.files import answer
from agentrl.cluster.protocol import EngineTask, RolloutTask, State, Task, TrainerTask
from agentrl.cluster.rollouts import PlaySpec
from agentrl.cluster.store import Store
from agentrl.cluster.warm import WarmRanks
from agentrl.conductor.cause import death, first_to_fail, read_rank, signed
from agentrl.conductor.engines import UNPUBLISHED
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer, start_engine
from agentrl.errors import AgentRLError

_POLL = 0.1
_SETTLE = 1.0
_SIOCGIFADDR = 0x8915


class Run(ABC):
    """One task, from its preparation to its end; what it says of itself goes into the worker's beats."""

    def __init__(self, task: Task, store: Store, scratch: Path, changed: asyncio.Event) -> None:
        self.task = task
        self.state: State = "preparing"
        self.code: int | None = None
        self.text = ""
        self._store, self._changed = store, changed
        self._folder = scratch / f"{task.kind}-{task.generation}"
        # Logs outlive the task; a worker that a conductor started here writes them into the run's folder.
        self._logs = Path(os.environ.get(LOGS_VARIABLE) or scratch / "logs")
        self._work = asyncio.ensure_future(self._guarded())

    async def _guarded(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            await self._go()
        except (AgentRLError, OSError, aiohttp.ClientError) as error:
            self._tell("ended", 1, f"{type(error).__name__}: {error}")

    def _tell(self, state: State, code: int | None = None, text: str = "") -> None:
        self.state, self.code, self.text = state, code, text
        self._changed.set()

    async def end(self) -> None:
        """End it at once, whatever it does."""
        self._work.cancel()
        await asyncio.wait((self._work,))
        await self._kill()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @abstractmethod
    async def _go(self) -> None:
        """Prepare, run, and tell the end."""

    @abstractmethod
    async def _kill(self) -> None:
        """Leave nothing running."""


class EngineRun(Run):
    """An engine server on loopback, and the way to it."""

    task: EngineTask

    url = ""
    """Of the engine, once it serves."""
    _server: EngineServer | None = None

    async def _go(self) -> None:
        model = await self._store.have(self.task.model)
        options = EngineOptions.model_validate(self.task.options)
        log = self._logs / "engine.log"
        self._server = await asyncio.to_thread(start_engine, options, model, UNPUBLISHED, log, 0)
        await self._server.wait_ready()
        self.url = self._server.url
        self._tell("running")
        code = await self._server.child.wait()
        self._tell("ended", code, death(self._server.child, code))

    async def _kill(self) -> None:
        if self._server is not None:
            self._server.child.kill()
            await self._server.child.wait()

    async def forward(self, http: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
        """Pass a request on. An engine that is not there breaks the connection, as if it were asked itself."""
        path, body = request.match_info["path"], await request.read()
        if path == "update_weights_from_disk":
            wanted = orjson.loads(body)
            folder = self._store.held(str(wanted["model_path"]))
            if folder is None:
                return answer(409, {"success": False, "message": f"{wanted['model_path']} was not fetched"})
            body = orjson.dumps({**wanted, "model_path": str(folder)})
        if not self.url:
            return answer(503, {"error": {"message": "the engine starts"}})
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Content-Type": "application/json"}
        try:
            async with http.request(
                request.method, f"{self.url}/{path}", data=body, headers=headers, timeout=timeout
            ) as upstream:
                kind = {"Content-Type": upstream.headers.get("Content-Type", "application/json")}
                if upstream.content_length is not None:
                    return web.Response(status=upstream.status, body=await upstream.read(), headers=kind)
                response = web.StreamResponse(status=upstream.status, headers=kind)
                await response.prepare(request)
                async for part in upstream.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=503)


class TrainerRun(Run):
    """This host's ranks of one incarnation's group."""

    task: TrainerTask

    def __init__(
        self,
        task: TrainerTask,
        store: Store,
        scratch: Path,
        changed: asyncio.Event,
        conductor: str,
        host: str,
        warm: WarmRanks,
    ) -> None:
        self._conductor, self._host, self._warm = conductor, host, warm
        self._ranks: list[Child] = []
        super().__init__(task, store, scratch, changed)

    def find(self, name: str) -> Path | None:
        """The folder that a rank made and the conductor asks for: `weights-1.7` or `checkpoint-20`."""
        kind, _, label = name.partition("-")
        if kind == "weights":
            found = self._folder / "weights" / label
        elif kind == "checkpoint" and label.isdecimal():
            found = self._folder / "checkpoints" / f".aside-{int(label):07d}"
        else:
            return None
        return found if found.parent.parent == self._folder and found.is_dir() else None

    async def _go(self) -> None:
        path = self._folder / "trainer.json"
        path.write_bytes(orjson.dumps(await self._job()))
        for local, rank in enumerate(self.task.ranks):
            self._ranks.append(self._rank(path, local, rank))
        self._tell("running")
        while True:
            codes = [child.poll() for child in self._ranks]
            if any(codes):
                # Whichever ended first: it may be the one that lost another, which is about to say why.
                await asyncio.sleep(_SETTLE if len(codes) > 1 else 0)
                self._tell("ended", *self._cause())
                self._warm.fill()  # the group is about to be started again
                return
            if None not in codes:
                self._tell("ended", 0)
                return
            await asyncio.sleep(_POLL)

    def _cause(self) -> tuple[int, str]:
        ended = {
            rank: (child, code)
            for rank, child in zip(self.task.ranks, self._ranks, strict=True)
            if (code := child.poll())
        }
        first = first_to_fail(
            [read_rank(rank, child.log, child.log_start, signed(code)) for rank, (child, code) in ended.items()]
        )
        child, code = ended[first.rank if first is not None else min(ended)]
        return code, death(child, code)

    async def _job(self) -> dict[str, Any]:
        task, folder = self.task, self._folder
        job = {**task.job, "feed_url": f"{self._conductor}/feed", "weights_dir": str(folder / "weights")}
        if task.shared:
            return job
        job |= {"model_dir": str(await self._store.have(task.model)), "commit": "conductor"}
        job |= {"checkpoints_dir": str(folder / "checkpoints")}
        if task.resume is not None:
            job["resume"] = str(await self._store.have(task.resume))
        if task.reference is not None:
            job["algorithm"] = {**job["algorithm"], "reference": str(await self._store.have(task.reference))}
        return job

    def _rank(self, job: Path, local: int, rank: int) -> Child:
        task = self.task
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(len(task.ranks)),
            "WORLD_SIZE": str(task.world),
            "MASTER_ADDR": task.master,
            "MASTER_PORT": str(task.port),
            "AGENTRL_TOKEN": task.token,
        }
        if interface := _interface(self._host):
            environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return self._warm.start(f"trainer rank {rank}", job, environment, self._logs / f"rank-{rank}.log")

    async def _kill(self) -> None:
        for child in self._ranks:
            child.kill()
        for child in self._ranks:
            await child.wait()


def _interface(host: str) -> str | None:
    """The network interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None


class RolloutRun(Run):
    """Plays episodes in a process of its own, so that what an environment does never keeps this one's beats."""

    task: RolloutTask

    def __init__(
        self,
        task: RolloutTask,
        store: Store,
        scratch: Path,
        changed: asyncio.Event,
        conductor: str,
        token: str,
        lease: str,
    ) -> None:
        self._conductor, self._token, self._lease = conductor, token, lease
        self._child: Child | None = None
        super().__init__(task, store, scratch, changed)

    async def _go(self) -> None:
        spec = PlaySpec(
            conductor=self._conductor,
            lease=self._lease,
            generation=self.task.generation,
            config=self.task.config,
            model=await self._store.have(self.task.model),
        )
        path = self._folder / "play.json"
        path.write_text(spec.model_dump_json())
        argv = [sys.executable, "-m", "agentrl.cluster.play", str(path)]
        environment = {"AGENTRL_CLUSTER_TOKEN": self._token, "PYTHONUNBUFFERED": "1", LOGS_VARIABLE: str(self._logs)}
        self._child = Child("the rollout process", argv, log=self._logs / "play.log", env=environment)
        self._tell("running")
        code = await self._child.wait()
        self._tell("ended", code, death(self._child, code))

    async def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            await self._child.wait()
