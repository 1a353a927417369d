"""Weights over a process group of the trainer's rank 0 and the engines, instead of by way of a folder.

    trainer  POST /group    → the group that has all serving engines; where there is none yet, they are told to join
    trainer  POST /receive  → the version is offered to the publisher, the engines pause; once all expect buckets: go
    trainer  broadcasts; each engine takes bucket after bucket, then its label, and goes on
    trainer  writes the folder all the same: for an engine that comes later, and for one that did not get all buckets

A publish that fails in the middle thus ends from the folder. An engine that SGLang's in-place loading left with a
mixture bears a label of no version (it serves nothing) until it has loaded one whole.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel, ConfigDict

from agentrl.conductor.engines import UNPUBLISHED
from agentrl.conductor.feed import WeightsReady, parsed, reply
from agentrl.conductor.publish import WeightsLost
from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.receive import Bucket, Meeting, Member
from agentrl.engine.router import Load, Router
from agentrl.errors import DeadlineExceeded, EngineError, EngineLost
from agentrl.types import Version

JOIN_SECONDS = 40.0
"""The trainer waits 30 s for the others."""
GO_SECONDS = 60.0
"""How long the trainer is kept before it is told to write a folder only; the feed answers within 90 s."""
MEET_SECONDS = 10.0
"""How long paused engines wait for the last of them to expect the weights."""
FOLDER_SECONDS = 600.0
"""How long engines that did not get all buckets wait for the folder."""


class GroupAsked(BaseModel):
    """The trainer is in group `held` (empty: in none) and would meet a new one at the store on `address`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    held: str
    address: str
    port: int
    backend: str


class ReceiveAsked(BaseModel):
    """The trainer is about to broadcast `buckets`, and to write a folder at `path`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    version: str
    path: str
    buckets: tuple[Bucket, ...]


class _Transfer:
    """One version on its way."""

    def __init__(self, asked: ReceiveAsked, members: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        self.asked, self.version = asked, Version.parse(asked.version)
        self.expected = set(members)
        self.go: asyncio.Future[bool] = loop.create_future()
        self.folder: asyncio.Future[Path] = loop.create_future()
        self.folder.add_done_callback(lambda f: f.cancelled() or f.exception())  # it may be that nobody waits for it
        self.used = False

    def decide(self, go: bool) -> None:
        if not self.go.done():
            self.go.set_result(go)


class Handover:
    """Both ends of a transfer, joined: `routes` for the trainer, `load` for the router."""

    def __init__(
        self,
        options: EngineOptions,
        router: Callable[[], Router],
        offer: Callable[[WeightsReady], None],
        note: Callable[[str], None],
    ) -> None:
        self._options, self._router, self._offer, self._note = options, router, offer, note
        self._members: dict[str, Member] = {}
        self._name, self._broken, self._count = "", True, 0
        self._nonce = secrets.token_hex(4)  # an engine may still know the groups of another conductor
        self._urls: tuple[str, ...] = ()
        self._refused: set[tuple[str, ...]] = set()
        self._joining: asyncio.Task[None] | None = None
        self._now: _Transfer | None = None
        self.carried: Version | None = None
        """The last version that came to an engine over the group."""

    # -- what the trainer asks ---------------------------------------------------------------------------------------

    def routes(self, app: web.Application) -> None:
        """Beside the feed's own."""
        app.router.add_post("/group", self._group)
        app.router.add_post("/receive", self._receive)

    async def _group(self, request: web.Request) -> web.StreamResponse:
        asked = parsed(GroupAsked, await request.read())
        urls = self._router().serving
        if not urls or urls in self._refused:
            return reply(200, {"name": ""})
        backend = asked.backend if self._options.kind == "sglang" and self._options.device != "cpu" else "gloo"
        world = 1 + len(urls) * self._options.tensor_parallel
        if self._broken or asked.held != self._name or urls != self._urls:
            await self._stop_joining()
            self._count += 1
            before, self._name, self._urls = self._name, f"weights-{self._nonce}-{self._count}", urls
            self._broken = False
            meeting = Meeting(self._name, asked.address, asked.port, world, backend)
            self._joining = asyncio.create_task(self._join(meeting, urls, before))
        return reply(200, {"name": self._name, "world": world, "backend": backend})

    async def _receive(self, request: web.Request) -> web.StreamResponse:
        asked = parsed(ReceiveAsked, await request.read())
        if self._now is None or self._now.asked != asked:  # else asked again after a lost connection
            if not await self._joined():
                return reply(200, {"go": False})
            self._now = _Transfer(asked, self._urls)
            self._offer(WeightsReady(step=asked.step, version=asked.version, path=asked.path, seconds=0.0))
        transfer = self._now
        await asyncio.wait([transfer.go], timeout=GO_SECONDS)
        transfer.decide(False)
        return reply(200, {"go": transfer.go.result()})

    # -- what the run asks -------------------------------------------------------------------------------------------

    def arrived(self, ready: WeightsReady) -> bool:
        """A folder is written: whether it belongs to a transfer, which has been offered already."""
        transfer = self._now
        if transfer is None or str(transfer.version) != ready.version:
            return False
        transfer.decide(False)
        if not transfer.folder.done():
            transfer.folder.set_result(Path(ready.path))
        return True

    async def load(self, version: Version) -> Load | None:
        """How each engine gets `version`; None: from its folder, which is there. WeightsLost where none will come."""
        transfer = self._now
        if transfer is None or transfer.version != version:
            return None
        if transfer.used or not transfer.expected <= set(self._router().serving):
            transfer.decide(False)
        if transfer.go.done() and (transfer.used or not transfer.go.result()):
            await _folder(transfer)
            return None
        transfer.used = True
        return lambda client: self._load(transfer, client)

    def abandon(self) -> None:
        """The trainer is gone: what it was sending will not come."""
        transfer, self._now, self._broken = self._now, None, True
        if transfer is not None:
            transfer.decide(False)
            if not transfer.folder.done():
                transfer.folder.set_exception(WeightsLost("the trainer ended while it sent them"))

    async def close(self) -> None:
        """Let go of the engines."""
        await self._stop_joining()
        for member in self._members.values():
            await member.close()

    # -- one engine --------------------------------------------------------------------------------------------------

    async def _load(self, transfer: _Transfer, client: EngineClient) -> None:
        member = self._members.get(client.url)
        try:
            if member is not None and await self._expects(transfer, client, member):
                client.version = self.carried = transfer.version
                return
        except (EngineError, DeadlineExceeded) as error:
            self._note(f"weights {transfer.version} did not reach {client.url} over the group: {error}")
            self._broken = True  # nobody knows what the others wait for: the next transfer begins with a new group
            transfer.decide(False)
        try:
            folder = await _folder(transfer)
            await client.update_from_disk(folder, transfer.version)
        except (EngineError, DeadlineExceeded) as error:
            if client.hot_swap:
                raise
            reason = f"it may hold a mixture of weights: {error}"
            self._router().fence(client.url, reason)
            raise EngineLost(f"{client.url}: {reason}") from error

    async def _expects(self, transfer: _Transfer, client: EngineClient, member: Member) -> bool:
        """Receive; False where not all came so far that anything was sent."""
        if not client.hot_swap:
            await client.set_version(UNPUBLISHED)
        await member.begin()
        try:
            transfer.expected.discard(client.url)
            if not transfer.expected:
                transfer.decide(True)
            await asyncio.wait([transfer.go], timeout=MEET_SECONDS)
            transfer.decide(False)
            if not transfer.go.result():
                return False
            await member.receive(self._name, transfer.version, transfer.asked.buckets, self._options.load_timeout)
        finally:
            await member.end()
        return True

    # -- the group ---------------------------------------------------------------------------------------------------

    async def _join(self, meeting: Meeting, urls: tuple[str, ...], before: str) -> None:
        for url in set(self._members) - set(urls):
            await self._members.pop(url).close()

        async def one(index: int, url: str) -> None:
            member = self._members.setdefault(url, Member(url))
            if before:
                await member.leave(before)
            await member.join(meeting, 1 + index * self._options.tensor_parallel, JOIN_SECONDS)

        results = await asyncio.gather(*(one(i, url) for i, url in enumerate(urls)), return_exceptions=True)
        for url, found in zip(urls, results, strict=True):
            if isinstance(found, DeadlineExceeded):
                self._router().fence(url, f"it hangs in joining the weights group: {found}")
        errors = [found for found in results if isinstance(found, BaseException)]
        if errors:
            self._refused.add(urls)
            self._broken = True
            self._note(f"no weights group with {len(urls)} engines, folders are used instead: {errors[0]}")

    async def _joined(self) -> bool:
        if self._joining is not None:
            await asyncio.wait([self._joining], timeout=GO_SECONDS)
            if not self._joining.done():
                return False
        return not self._broken

    async def _stop_joining(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait([self._joining])
            self._joining = None


async def _folder(transfer: _Transfer) -> Path:
    try:
        return await asyncio.wait_for(asyncio.shield(transfer.folder), FOLDER_SECONDS)
    except TimeoutError as error:
        # Not lost: the trainer lives, and may itself wait until these weights are out. The publisher asks again.
        raise EngineError(
            f"the trainer wrote no folder of weights {transfer.version} within {FOLDER_SECONDS:.0f} s"
        ) from error
