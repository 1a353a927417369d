"""Beats have a thread, an event loop and a port of their own: a conductor that is busy does not lose its workers.

    POST /beat    Beat → Orders            at the port that `Joined` names

The thread hears, answers and notices silence; what follows from it is the business of the conductor's own loop. It
shares nothing with that loop but attributes of `Member`, each written by one side and replaced as a whole.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from aiohttp import web

from agentrl.cluster.files import answer, guard, read_body
from agentrl.cluster.protocol import Beat, Join, Orders, Task
from agentrl.errors import ConfigError, InfrastructureError

Result = TypeVar("Result")
TICK = 0.2
STARVED_SECONDS = 1.0
"""If this process itself was stopped for so long, nobody's silence counts over that time."""


class Member:
    """A worker that has joined."""

    def __init__(self, lease: str, join: Join) -> None:
        self.lease, self.join = lease, join
        self.heard = time.monotonic()
        self.beat = Beat(lease=lease)
        self.task: Task | None = None
        self.over = False
        """Set by the thread of beats, before anybody is told: from then on no beat is answered."""
        self.gone = ""
        """Why it is lost; empty while it is there."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.join.role} worker {self.join.name}"

    @property
    def on_task(self) -> bool:
        """Whether its last beat was about the present task."""
        return self.task is not None and self.beat.generation == self.task.generation


class MemberGone(InfrastructureError):
    """The worker that something was wanted of is lost."""


async def while_there(member: Member, work: Coroutine[Any, Any, Result]) -> Result:
    """The outcome of `work`, which is not waited for longer than its host is there: MemberGone.

    A link that is cut says nothing to a connection that waits; beats do.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if member.gone:
                raise MemberGone(f"{member.name} is lost: {member.gone}")
            await asyncio.wait((task,), timeout=TICK)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait((task,))


class Beats:
    """Answers beats and notices silence. `silent` is called in the loop that called `start`."""

    def __init__(
        self,
        token: str,
        members: Mapping[str, Member],
        lost_seconds: float,
        silent: Callable[[Member, str], None],
    ) -> None:
        self._token, self._members, self._lost_seconds, self._silent = token, members, lost_seconds, silent
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._failed: Future[None] = Future()
        self.watching = False
        """Whether who is silent is given up."""

    async def start(self, host: str, port: int) -> int:
        """Listen; the port. ConfigError where it cannot."""
        bound: Future[int] = Future()
        self._owner = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(host, port, bound), name="beats", daemon=True)
        self._thread.start()
        try:
            return await asyncio.wrap_future(bound)
        except OSError as error:
            raise ConfigError(
                f"cluster.host = {host!r}: beats cannot be heard on port {port}, which is cluster.port + 1: "
                f"{error.strerror}; give an address of this machine and two free ports in a row"
            ) from error

    async def failed(self) -> None:
        """Waits for a failure of the thread, and raises it."""
        await asyncio.wrap_future(self._failed)

    async def stop(self) -> None:
        """End the thread."""
        if self._thread is None:
            return
        if self._loop is not None and self._over is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    # --- in the thread

    def _run(self, host: str, port: int, bound: Future[int]) -> None:
        try:
            asyncio.run(self._serve(host, port, bound))
        except BaseException as error:
            # The thread's own boundary: told to whoever waits in the other one.
            (self._failed if bound.done() else bound).set_exception(error)

    async def _serve(self, host: str, port: int, bound: Future[int]) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[guard(self._token)])
        app.add_routes([web.post("/beat", self._beat)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
            bound.set_result(int(runner.addresses[0][1]))
            await self._watch(self._over)
        finally:
            await runner.cleanup()

    async def _watch(self, over: asyncio.Event) -> None:
        last = time.monotonic()
        while not over.is_set():
            try:
                async with asyncio.timeout(TICK):
                    await over.wait()
            except TimeoutError:
                pass
            now = time.monotonic()
            starved, last = now - last - TICK, now
            for member in list(self._members.values()):
                if starved > STARVED_SECONDS:
                    member.heard += starved
                silence = now - member.heard
                if self.watching and silence > self._lost_seconds and not member.over:
                    member.over = True
                    assert self._owner is not None
                    self._owner.call_soon_threadsafe(self._silent, member, f"not heard of for {silence:.1f} s")

    async def _beat(self, request: web.Request) -> web.StreamResponse:
        beat = await read_body(Beat, request)
        member = self._members.get(beat.lease)
        if member is None or member.over:
            return answer(410, {"error": f"lease {beat.lease} is over: end what runs, and join again"})
        member.heard, member.beat = time.monotonic(), beat
        return answer(200, Orders(task=member.task).model_dump(mode="json"))
