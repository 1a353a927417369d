"""The conductor's side of the cluster: who is there, what each is to do, who was lost.

A worker is known by its lease. One that is silent for `lost_seconds` is lost for good: its lease is never valid again,
and if the host comes back, its worker ends what it ran and joins as a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import aiohttp
from aiohttp import web

from agentrl import __version__
from agentrl.cluster.beats import Beats, Member
from agentrl.cluster.files import Shelf, answer, guard, open_http, read_body
from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.protocol import Join, Joined, Leave, Role, Welcome
from agentrl.errors import ConfigError

_DISMISSAL = aiohttp.ClientTimeout(total=10.0, sock_connect=5.0)
"""A worker that misses its dismissal waits for another conductor: one that is slow to answer shall not."""


class Hub:
    """Listens for workers.

    ```python
    hub = Hub(options, token, run="r", note=print)
    url = await hub.start({"/feed": feed.application()})
    watching = asyncio.create_task(hub.run())
    hub.members("engine")
    await hub.stop()
    ```
    """

    def __init__(
        self,
        options: ClusterOptions,
        token: str,
        *,
        run: str,
        note: Callable[[str], None],
        probe_dir: Path | None = None,
    ) -> None:
        self.options, self.token = options, token
        self.shelf = Shelf()
        self.url = ""
        self.nonce = secrets.token_hex(4)
        """Of this start of the conductor: leases and names of folders of another one are none of ours."""
        self._run, self._note = run, note
        self._members: dict[str, Member] = {}
        self._joins: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._generations = itertools.count(1)
        self._probe_dir = probe_dir
        self._probe = ""
        self._runner: web.AppRunner | None = None
        self._http: aiohttp.ClientSession | None = None
        self._beats = Beats(token, self._members, options.lost_seconds, self.lose)
        self._beat_port = 0
        self.lost = 0

    async def start(self, apps: dict[str, web.Application]) -> str:
        """Listen, with `apps` below their paths; the base URL. ConfigError where it cannot."""
        if self._probe_dir is not None:
            self._probe = secrets.token_hex(16)
            (self._probe_dir / ".shared").write_text(self._probe)
        main = web.Application(middlewares=[guard(self.token)], client_max_size=64 << 20)
        main.add_routes(
            [
                web.get("/", self._welcome),
                web.post("/join", self._join),
                web.post("/leave", self._leave),
            ]
        )
        files = web.Application(middlewares=[guard(self.token)])
        files.add_routes(self.shelf.routes())
        root = web.Application()
        root.add_subapp("/cluster", main)
        root.add_subapp("/files", files)
        for path, app in apps.items():
            root.add_subapp(path, app)
        self._runner = web.AppRunner(root, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.options.host, self.options.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cluster.host = {self.options.host!r}, cluster.port = {self.options.port}: {error.strerror}; give an "
                "address of this machine and a free port"
            ) from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._beat_port = await self._beats.start(self.options.host, self.options.port and self.options.port + 1)
        self._http = open_http(self.token)
        return self.url

    @property
    def http(self) -> aiohttp.ClientSession:
        """Connections to the workers, with the token."""
        assert self._http is not None, "the hub is not started"
        return self._http

    async def stop(self) -> None:
        """Tell the workers that the run is over, and stop listening."""
        members = list(self._members.values())
        self._members.clear()
        if self._http is not None:
            await asyncio.gather(*(self._dismiss(member) for member in members))
            await self._http.close()
        await self._beats.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._probe_dir is not None:
            (self._probe_dir / ".shared").unlink(missing_ok=True)

    def members(self, role: Role) -> list[Member]:
        """Who is there, in the order of joining."""
        return [m for m in self._members.values() if m.join.role == role]

    def joins(self, name: str) -> int:
        """How often a worker of that name has joined."""
        return self._joins[name]

    def generation(self) -> int:
        """A number that no other task has."""
        return next(self._generations)

    def lose(self, member: Member, reason: str) -> None:
        """Give a worker up: nothing of what it runs counts any more."""
        if self._members.pop(member.lease, None) is not None:
            member.gone = reason
            self.lost += 1
            self._note(f"{member.name} at {member.join.host} is lost: {reason}")

    async def run(self) -> None:
        """Watch the beats until cancelled."""
        self._beats.watching = True
        try:
            await self._beats.failed()
        finally:
            self._beats.watching = False

    # --- what workers ask

    async def _welcome(self, request: web.Request) -> web.StreamResponse:
        probe = str((self._probe_dir / ".shared").absolute()) if self._probe_dir is not None else None
        welcome = Welcome(run=self._run, version=__version__, probe=probe, lost_seconds=self.options.lost_seconds)
        return answer(200, welcome.model_dump())

    async def _join(self, request: web.Request) -> web.StreamResponse:
        join = await read_body(Join, request)
        if join.version != __version__:
            return answer(409, {"error": f"this worker has agentrl {join.version}, the conductor {__version__}"})
        # Engines fetch what they load; only a trainer's checkpoints lie where others must see them.
        if join.role == "trainer" and self._probe_dir is not None and join.probe != self._probe:
            return answer(
                409,
                {
                    "error": f"cluster.shared_disk is true, but {self._probe_dir} is not the same folder on this "
                    "worker's host: mount it under the same path, or set cluster.shared_disk = false"
                },
            )
        lease = f"{join.role}-{next(self._numbers)}-{secrets.token_hex(8)}"
        self._members[lease] = Member(lease, join)
        self._joins[join.name] += 1
        self._note(f"{join.role} worker {join.name} joined from {join.host}")
        return answer(200, Joined(lease=lease, beats=self._beat_port).model_dump())

    async def _leave(self, request: web.Request) -> web.StreamResponse:
        member = self._members.get((await read_body(Leave, request)).lease)
        if member is not None:
            self.lose(member, "it left")
        return answer(200, {})

    async def _dismiss(self, member: Member) -> None:
        try:
            async with self.http.post(f"{member.join.address}/stop", timeout=_DISMISSAL):
                pass
        except (aiohttp.ClientError, TimeoutError):
            pass  # it will find out by itself: nobody answers its beats


def slots(members: Iterable[Member]) -> int:
    """Ranks that these workers can run."""
    return sum(member.join.slots for member in members)
