"""Episodes played by other processes: the conductor's side.

    POST /rollout/next   `Next` → `Work`                 held until there is something
    POST /rollout/done?lease=…&generation=…&job=…        bytes of `encode_group` with the one episode

A job is an episode to play. A worker that is lost loses only the episodes that it ran: each goes to another one, the
same row and seeds. What comes from a lease or generation that is over is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from agentrl import errors
from agentrl.cluster.files import answer, guard, read_body
from agentrl.cluster.hub import Hub
from agentrl.cluster.protocol import RolloutTask, Source
from agentrl.conductor.watchdog import Wait
from agentrl.errors import AgentRLError, DataError, RunError
from agentrl.rollout.episode import EpisodeSpec, Outcome
from agentrl.rollout.player import Sampling
from agentrl.sandbox.census import Figures, added, counters
from agentrl.types import Episode, Group, Row
from agentrl.wire import decode_group, encode_group

HOLD_SECONDS = 5.0
DEATHS, CALM_SECONDS = 5, 60.0
"""Rollout processes that may end by themselves in so many seconds before the run does."""
_TICK = 0.2


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlaySpec(_Wire):
    """What `python -m agentrl.cluster.play` is started with, besides $AGENTRL_CLUSTER_TOKEN."""

    conductor: str
    lease: str
    generation: int
    config: dict[str, Any]
    """`RunConfig`, as set."""
    model: Path
    """A folder with the model's config, tokenizer and template; weights are not needed."""


class Job(_Wire):
    """One episode to play."""

    id: int
    group: int
    sample: int
    attempt: int
    seed: int
    row: dict[str, Any]
    name: str
    sampling_seed: int | None
    training: bool
    temperature: float

    def parts(self) -> tuple[EpisodeSpec, Sampling]:
        """What a `Player` is given."""
        spec = EpisodeSpec(self.group, self.sample, self.attempt, self.seed, self.row)
        return spec, Sampling(self.name, self.sampling_seed, self.training, self.temperature)


class Next(_Wire):
    """A rollout process asks for work. `serial` is that of the engines that it knows, `got` the last answer it had."""

    lease: str
    generation: int
    serial: int
    got: int
    sandboxes: dict[str, float] = {}
    """What its sandboxes count (`sandbox/census.py`)."""


class Work(_Wire):
    """The answer. It is given again until the next request says that it was had."""

    number: int
    jobs: tuple[Job, ...]
    cancel: tuple[int, ...]
    engines: tuple[str, ...]
    serial: int


class _Place(NamedTuple):
    lease: str
    generation: int


@dataclass
class _Desk:
    """What one rollout process has and is to be told."""

    jobs: dict[int, Job] = field(default_factory=dict)
    fresh: list[Job] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    last: Work | None = None
    sandboxes: Figures = field(default_factory=dict)


class Rollouts:
    """A player whose episodes run elsewhere; the same calls as `Player`.

    `busy` marks the time in which an episode runs, `engines` are the addresses of those that serve.
    """

    def __init__(
        self,
        hub: Hub,
        config: dict[str, Any],
        model: Source,
        engines: Callable[[], Sequence[str]],
        busy: Callable[[], AbstractContextManager[None]],
        on_episode: Callable[[Episode], None],
        note: Callable[[str], None],
    ) -> None:
        self.retried = 0
        self.model = model
        self._hub, self._config = hub, config
        self._ask_engines, self._busy, self._on_episode, self._note = engines, busy, on_episode, note
        self._engines: tuple[str, ...] = ()
        self._serial = 0
        self._desks: dict[_Place, _Desk] = {}
        self._unplaced: list[Job] = []
        self._open: dict[int, tuple[asyncio.Future[Outcome], Callable[[], None], Row]] = {}
        self._ids = itertools.count(1)
        self._deaths: list[float] = []
        self._gone: Figures = {}

    # --- the player

    def sandboxes(self) -> Figures:
        """Those of all rollout processes, with what ended ones had counted."""
        return added([self._gone, *(desk.sandboxes for desk in self._desks.values())])

    async def play(
        self, spec: EpisodeSpec, sampling: Sampling, *, on_act: Callable[[], None] = lambda: None
    ) -> Outcome:
        """One episode with its retries, wherever there is room."""
        job = Job(
            id=next(self._ids),
            group=spec.group,
            sample=spec.sample,
            attempt=spec.attempt,
            seed=spec.seed,
            row=dict(spec.row),
            name=sampling.name,
            sampling_seed=sampling.seed,
            training=sampling.training,
            temperature=sampling.temperature,
        )
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._open[job.id] = (future, on_act, spec.row)
        self._place(job)
        try:
            with self._busy():
                return await future
        finally:
            del self._open[job.id]
            self._withdraw(job.id)

    def _place(self, job: Job) -> None:
        if not self._desks:
            self._unplaced.append(job)
            return
        desk = min(self._desks.values(), key=lambda d: len(d.jobs))
        desk.jobs[job.id] = job
        desk.fresh.append(job)
        desk.wake.set()
        # From here on a token of it may be sampled: the group's age counts.
        self._open[job.id][1]()

    def _withdraw(self, job: int) -> None:
        self._unplaced = [waiting for waiting in self._unplaced if waiting.id != job]
        for desk in self._desks.values():
            if desk.jobs.pop(job, None) is not None:
                desk.cancel.append(job)
                desk.wake.set()

    # --- the workers

    async def run(self) -> None:
        """Give workers their task and take over from lost ones, until cancelled."""
        while True:
            live = set()
            for member in self._hub.members("rollout"):
                if member.on_task and member.beat.state == "ended":
                    self._died(member.name, member.beat.text)
                if member.task is None or (member.on_task and member.beat.state == "ended"):
                    member.task = RolloutTask(generation=self._hub.generation(), config=self._config, model=self.model)
                live.add(_Place(member.lease, member.task.generation))
            for place in [place for place in self._desks if place not in live]:
                self._take_over(place)
            engines = tuple(self._ask_engines())
            if engines != self._engines:
                self._engines, self._serial = engines, self._serial + 1
                for desk in self._desks.values():
                    desk.wake.set()
            await asyncio.sleep(_TICK)

    def _take_over(self, place: _Place) -> None:
        desk = self._desks.pop(place)
        self._gone = added([self._gone, counters(desk.sandboxes)])
        jobs = list(desk.jobs.values())
        if jobs:
            self._note(f"{len(jobs)} episodes that {place.lease.rpartition('-')[0]} ran are asked again")
        self.retried += len(jobs)
        for job in jobs:
            self._place(job)

    def _died(self, name: str, text: str) -> None:
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < CALM_SECONDS] + [now]
        self._note(f"{name}: {text.partition(chr(10))[0]}; it is started again")
        if len(self._deaths) > DEATHS:
            raise RunError(f"{name} ended {len(self._deaths)} times within {CALM_SECONDS:.0f} s, at last:\n{text}")

    @property
    def workers(self) -> int:
        """Rollout processes that have asked for work."""
        return len(self._desks)

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        spread = Counter({place.lease.rpartition("-")[0]: len(desk.jobs) for place, desk in self._desks.items()})
        told = (
            ", ".join(f"{name} plays {count}" for name, count in sorted(spread.items())) or "no rollout worker is there"
        )
        return [Wait("rollouts", f"{len(self._unplaced)} episodes to be placed; {told}", 0.0)]

    def application(self) -> web.Application:
        """To be served below /rollout."""
        app = web.Application(middlewares=[guard(self._hub.token)], client_max_size=1 << 30)
        app.add_routes([web.post("/next", self._next), web.post("/done", self._done)])
        return app

    def _valid(self, place: _Place) -> bool:
        return any(
            m.lease == place.lease and m.task is not None and m.task.generation == place.generation
            for m in self._hub.members("rollout")
        )

    async def _next(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_body(Next, request)
        place = _Place(wanted.lease, wanted.generation)
        if not self._valid(place):
            return answer(410, {"error": f"{place} is over"})
        desk = self._desks.get(place)
        if desk is None:
            desk = self._desks[place] = _Desk()
            unplaced, self._unplaced = self._unplaced, []
            for job in unplaced:
                self._place(job)
        desk.sandboxes = wanted.sandboxes
        known = desk.last is not None and wanted.got < desk.last.number
        if not (known or desk.fresh or desk.cancel or wanted.serial != self._serial):
            desk.wake.clear()
            try:
                async with asyncio.timeout(HOLD_SECONDS):
                    await desk.wake.wait()
            except TimeoutError:
                pass
        # Asked after the wait: the same question over a connection that broke may have been given the jobs meanwhile.
        if desk.last is not None and wanted.got < desk.last.number:
            return answer(200, desk.last.model_dump())
        jobs, cancel = tuple(job for job in desk.fresh if job.id in desk.jobs), tuple(desk.cancel)
        desk.fresh, desk.cancel = [], []
        desk.last = Work(number=wanted.got + 1, jobs=jobs, cancel=cancel, engines=self._engines, serial=self._serial)
        return answer(200, desk.last.model_dump())

    async def _done(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        place = _Place(request.query["lease"], int(request.query["generation"]))
        desk = self._desks.get(place)
        if desk is None or not self._valid(place):
            return answer(410, {"error": f"{place} is over"})
        job = desk.jobs.get(int(request.query["job"]))
        if job is None or job.id not in self._open:
            return answer(200, {})  # nobody waits for it any more
        future, _, row = self._open[job.id]
        outcome = outcome_from(body, request.headers.get("X-Error", ""), row)
        del desk.jobs[job.id]  # what cannot be read does not count as had
        self.retried += int(outcome.episode.metrics.get("retries", 0))
        self._on_episode(outcome.episode)
        if not future.done():
            future.set_result(outcome)
        return answer(200, {})


def outcome_bytes(outcome: Outcome) -> tuple[bytes, str]:
    """An episode on its way to the conductor, and the name of the error that ended it."""
    episode = outcome.episode
    error = "" if outcome.error is None else type(outcome.error).__name__
    return encode_group(Group(episode.group, episode.attempt, 0, "", (episode,))), error


def outcome_from(body: bytes, error: str, row: Row) -> Outcome:
    """The inverse; the row is the conductor's own, which keeps what JSON cannot say."""
    (sent,) = decode_group(body).episodes
    episode = Episode(
        group=sent.group,
        sample=sent.sample,
        attempt=sent.attempt,
        seed=sent.seed,
        row=row,
        messages=sent.messages,
        turns=sent.turns,
        trajectories=sent.trajectories,
        stop=sent.stop,
        metrics=sent.metrics,
        error=sent.error,
    )
    return Outcome(episode, _error(error, sent.error or "") if error else None)


def _error(name: str, text: str) -> AgentRLError:
    found = vars(errors).get(name)
    kind = found if isinstance(found, type) and issubclass(found, AgentRLError) else AgentRLError
    return kind(text)


def check_rows(rows: Sequence[Row]) -> None:
    """DataError where a row cannot travel."""
    for number, row in enumerate(rows):
        try:
            orjson.dumps(dict(row))
        except TypeError as error:
            raise DataError(f"row {number} cannot go to a rollout worker: {error}; rows must be plain JSON") from error
