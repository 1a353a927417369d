"""The conductor's side of the feed: what the trainer's ranks ask for and what they report, over loopback HTTP.

The wire is described in docs/architecture.md. What a batch is made of is the business of a `BatchSource`: the pool for
reinforcement learning, rendered conversations for supervised fine-tuning; what a report means, of `TrainerEvents`.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.errors import AgentRLError, InfrastructureError
from agentrl.types import Group, Version
from agentrl.wire import encode_group

HOLD_SECONDS = 20.0
"""How long a `/take` is held before the trainer is told to ask again."""


class Batch(NamedTuple):
    """What one trainer step trains on. `cursor` goes into the checkpoint unread. With `learn=False` the step is asked
    for again after the held-out loss of these groups was reported. `bodies`: the groups as bytes, without messages.
    """

    take: int
    groups: Sequence[Group]
    cursor: Mapping[str, Any]
    learn: bool = True
    bodies: Sequence[bytes] | None = None


class RunIsOver(AgentRLError):
    """There will be no further batch; the text is the reason the trainer is told."""


class BatchSource(Protocol):
    """Where batches come from."""

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        """The batch of `step`, waiting up to `wait` seconds for it; raises RunIsOver when there will be none."""


class WeightsReady(BaseModel):
    """A whole Hugging Face folder of `version` is at `path`, written in `seconds`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    version: str
    path: str
    seconds: float


class StepMetrics(BaseModel):
    """What the trainer measured in `step`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    version: str
    metrics: dict[str, float | int | list[float] | list[int] | str | None]


class CheckpointReady(BaseModel):
    """A checkpoint folder's rename has happened."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    version: str
    path: str
    take: int
    cursor: dict[str, Any]


class CommitRequest(BaseModel):
    """Every rank has written its part of the checkpoint of `step`, on its own host: fetch the parts, make it whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    version: str
    content: dict[str, Any]
    keep: int


class _Permit(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    version: str


class Phase(BaseModel):
    """A heartbeat: what a rank is doing, and for how many seconds it has stood still, waiting, at `where`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rank: int
    phase: str
    step: int
    still: float = 0.0
    where: str = ""


class _TakeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    version: str

    @property
    def parsed_version(self) -> Version:
        try:
            return Version.parse(self.version)
        except ValueError as error:
            raise _BadRequest(str(error)) from error


class _BadRequest(Exception):
    """The trainer sent what cannot be read."""


class TrainerEvents(Protocol):
    """What the run does with the trainer's reports; each returns quickly, the trainer waits for the answer."""

    async def weights(self, ready: WeightsReady) -> None:
        """New weights are on disk."""

    async def metrics(self, report: StepMetrics) -> None:
        """A step is done."""

    async def checkpoint(self, ready: CheckpointReady) -> None:
        """A checkpoint is whole."""

    async def phase(self, phase: Phase) -> None:
        """A rank is alive, and in this phase."""


class Trace(NamedTuple):
    """What a step made of one rank's tokens: `body` is for `agentrl.train.trace.decode_trace`."""

    incarnation: int
    step: int
    rank: int
    body: bytes


Body = TypeVar("Body", bound=BaseModel)


class FeedServer:
    """Serves one trainer group at a time; `begin` admits the next incarnation and shuts the previous one out.

    Each incarnation has a token of its own: a group given up for lost can hand in nothing. `on_commit` makes a
    checkpoint whole whose parts lie on several hosts, and returns its folder. `routes` adds calls.
    """

    def __init__(
        self,
        source: BatchSource,
        events: TrainerEvents,
        *,
        hold: float = HOLD_SECONDS,
        on_trace: Callable[[Trace], None] | None = None,
        on_commit: Callable[[CommitRequest], Awaitable[Path]] | None = None,
        routes: Callable[[web.Application], None] | None = None,
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self._retired: dict[str, int] = {}
        self._on_commit, self._routes = on_commit, routes
        self._commits: dict[tuple[str, int], asyncio.Task[Path]] = {}
        self._source = source
        self._events = events
        self._hold = hold
        self._on_trace = on_trace
        self._incarnation = 0
        self._step = -1
        self._batch: Batch | None = None
        self._bytes: Mapping[int, bytes] = {}
        self._manifest: Mapping[str, Any] = {}
        self._over: str | None = None
        self._taking = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def application(self) -> web.Application:
        """To be served by itself or below a path of another server."""
        app = web.Application(middlewares=[self._guard], client_max_size=64 << 20)
        app.router.add_post("/take", self._take)
        app.router.add_get(r"/take/{take:\d+}/group/{group:\d+}", self._group)
        app.router.add_post("/weights", _report(WeightsReady, self._events.weights))
        app.router.add_post("/metrics", _report(StepMetrics, self._measured))
        app.router.add_post("/checkpoint", _report(CheckpointReady, self._events.checkpoint))
        app.router.add_post(r"/trace/{incarnation:\d+}/{step:\d+}/{rank:\d+}", self._trace)
        app.router.add_post("/phase", _report(Phase, self._events.phase))
        app.router.add_post("/permit", _report(_Permit, self._permit))
        app.router.add_post("/commit", self._commit)
        if self._routes is not None:
            self._routes(app)
        return app

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns the base URL."""
        self._runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = self._runner.addresses[0]
        return f"http://{bound[0]}:{bound[1]}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def begin(self, incarnation: int) -> None:
        """A new trainer group starts: forget the last one's batch and refuse its late requests."""
        if self._incarnation:
            self._retired[self.token] = self._incarnation
            self.token = secrets.token_urlsafe(24)
        self._incarnation = incarnation
        async with self._taking:  # a held take of the old group ends first; the source un-takes it on resume
            # Also that the run is over, if that group was told so: this one goes back to a checkpoint.
            self._step, self._batch, self._bytes, self._over = -1, None, {}, None

    def fail(self, error: BaseException) -> None:
        """The conductor's side is broken: `broken` raises `error`."""
        if not self._failure.done():
            self._failure.set_exception(error)

    async def broken(self) -> None:
        """Waits for a failure of the conductor's side while it answered, and raises it."""
        await asyncio.shield(self._failure)

    def finish(self, reason: str) -> None:
        """Every `/take` is answered with "the run is over", until another group begins."""
        self._over = self._over or reason

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            # Again once the body is here: that may be long after, where a link was cut in the middle of the request.
            return self._refusal(request) or await _whole(request) or self._refusal(request) or await handler(request)
        except _BadRequest as error:
            return reply(400, {"error": str(error)})
        except Exception as error:
            # The conductor's own fault (a full disk): the run ends with it, not with the trainer's complaint.
            self.fail(error)
            return reply(500, {"error": f"the conductor failed: {type(error).__name__}: {error}"})

    def _refusal(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "")
        if (late := self._retired.get(given.removeprefix("Bearer "))) is not None:
            return self._late(late)
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return reply(401, {"error": "wrong or missing token: send 'Authorization: Bearer $AGENTRL_TOKEN'"})
        return None

    def _late(self, incarnation: int) -> web.Response:
        return reply(409, {"error": f"incarnation {incarnation} is over, now {self._incarnation} runs"})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        wanted = parsed(_TakeRequest, await request.read())
        version = wanted.parsed_version
        async with self._taking:
            if version.incarnation != self._incarnation:
                return self._late(version.incarnation)
            if self._batch is None or self._step != wanted.step:
                try:
                    batch = await self._next(wanted.step, version)
                except RunIsOver as over:
                    self.finish(str(over))
                    return reply(410, {"reason": str(over)})
                if batch is None:
                    return web.Response(status=204)
                # Bytes first: a batch that cannot be encoded was not handed out. In threads: large ones take long.
                told = await asyncio.to_thread(manifest, batch, wanted.step, version)
                self._bytes = await asyncio.to_thread(_bodies, batch)
                self._step, self._batch, self._manifest = wanted.step, batch, told
            return reply(200, self._manifest)

    async def _permit(self, asked: _Permit) -> None:
        """Whoever gets this far is of the present incarnation."""

    async def _commit(self, request: web.Request) -> web.StreamResponse:
        asked = parsed(CommitRequest, await request.read())
        if self._on_commit is None:
            return reply(404, {"error": "checkpoints of this run are made whole by the trainer's first rank"})
        key = (asked.version, asked.step)
        if (task := self._commits.get(key)) is None:  # asked again after a lost connection: one is under way or done
            self._commits = {key: (task := asyncio.ensure_future(self._on_commit(asked)))}
        try:
            return reply(200, {"path": str(await asyncio.shield(task))})
        except InfrastructureError as error:  # a host is gone: that group ends, and another one begins
            return reply(409, {"error": f"the checkpoint of step {asked.step} is not whole: {error}"})

    async def _measured(self, report: StepMetrics) -> None:
        await self._events.metrics(report)
        if self._batch is not None and not self._batch.learn:
            self._step, self._batch, self._bytes = -1, None, {}  # evaluated: the step's own batch comes next

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        incarnation, step, rank = (int(request.match_info[name]) for name in ("incarnation", "step", "rank"))
        body = await request.read()
        if self._on_trace is not None and incarnation == self._incarnation:
            self._on_trace(Trace(incarnation, step, rank, body))
        return reply(200, {})

    async def _next(self, step: int, version: Version) -> Batch | None:
        end = asyncio.get_running_loop().time() + self._hold
        while (left := end - asyncio.get_running_loop().time()) > 0:
            if self._over is not None:
                raise RunIsOver(self._over)
            if version.incarnation != self._incarnation:
                return None
            # In slices, so that a finished run or a new incarnation is seen within half a second.
            batch = await self._source.take(step, version, min(left, 0.5))
            if batch is not None:
                return batch
        return None

    async def _group(self, request: web.Request) -> web.StreamResponse:
        take, group = int(request.match_info["take"]), int(request.match_info["group"])
        if self._batch is None or self._batch.take != take or group not in self._bytes:
            return reply(404, {"error": f"group {group} is not in take {take}, or that take is over"})
        return web.Response(body=self._bytes[group], content_type="application/octet-stream")


def manifest(batch: Batch, step: int, version: Version) -> dict[str, Any]:
    """The JSON that describes a batch to every rank; docs/architecture.md has its form."""
    return {
        "take": batch.take,
        "step": step,
        "version": str(version),
        "cursor": dict(batch.cursor),
        "learn": batch.learn,
        "groups": [_group_entry(group) for group in batch.groups],
    }


def _bodies(batch: Batch) -> dict[int, bytes]:
    bodies = batch.bodies or [encode_group(group, messages=False) for group in batch.groups]
    return {group.id: body for group, body in zip(batch.groups, bodies, strict=True)}


async def _whole(request: web.Request) -> web.Response | None:
    try:
        await request.read()  # kept by the request: handlers have it at once
    except (ConnectionError, web.RequestPayloadError) as error:  # a rank died while it sent it
        return reply(400, {"error": f"the request broke off: {error}"})
    return None


def _group_entry(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "env": group.env,
        "episodes": [
            {
                "sample": episode.sample,
                "scored": episode.scored,
                "reward": episode.reward,
                "stop": episode.stop.value,
                "turns": [[t.index, t.trajectory, t.end, t.reward, t.agent] for t in episode.turns],
                "trajectories": [
                    {"length": len(t), "sampled": int(t.loss_mask.sum()), "abandoned": t.abandoned}
                    for t in episode.trajectories
                ],
            }
            for episode in group.episodes
        ],
    }


def _report(
    model: type[Body], handle: Callable[[Body], Awaitable[None]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        await handle(parsed(model, await request.read()))
        return reply(200, {})

    return handler


def parsed(model: type[Body], raw: bytes) -> Body:
    """What a call sent; the guard answers 400 where it cannot be read."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _BadRequest(str(error)) from error


def reply(status: int, body: Mapping[str, Any]) -> web.Response:
    """A call's answer."""
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")
