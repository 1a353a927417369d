"""A trainer's group over several hosts: its ranks get their places, and die together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from agentrl.cluster.beats import Member, MemberGone, while_there
from agentrl.cluster.files import QUIET_SECONDS, Listing, TransferFailed, fetch
from agentrl.cluster.hub import Hub, slots
from agentrl.cluster.protocol import Source, TrainerTask
from agentrl.conductor.cause import Death, is_consequence
from agentrl.conductor.feed import CommitRequest, Phase
from agentrl.conductor.publish import WeightsLost
from agentrl.conductor.trainer import STILL_SECONDS, Heartbeat, Heartbeats
from agentrl.conductor.watchdog import Wait
from agentrl.errors import EngineError, RunError
from agentrl.train import checkpoint
from agentrl.train.options import TrainerJob

_POLL = 0.1
_RETRY = 0.5
_OVER = "the group that wrote it is over"


class _Part(NamedTuple):
    """One worker's share of the group."""

    member: Member
    generation: int


class RemoteGroup:
    """One incarnation's ranks on the trainer workers of `hub`. The same calls as `TrainerGroup`.

    Where one of them ends or is lost, all are ended; the next incarnation waits until there are enough again.
    """

    def __init__(
        self,
        job: TrainerJob,
        token: str,
        hub: Hub,
        *,
        silent_seconds: float,
        keep_log: Callable[[str], Path],
        still_seconds: float = STILL_SECONDS,
    ) -> None:
        self.job, self._token, self._hub = job, token, hub
        self._keep_log = keep_log
        self._parts: list[_Part] = []
        self._beats = Heartbeats(job.train.ranks, silent_seconds, still_seconds)
        self._began = time.monotonic()
        self._clean = False
        self._over = False
        self._commits: set[asyncio.Task[None]] = set()
        self._renaming = asyncio.Lock()

    def heard(self, phase: Phase) -> None:
        """A heartbeat of a rank came in."""
        self._beats.heard(phase)

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        if not self._parts:
            return [Wait("the conductor", self._too_few(), time.monotonic() - self._began)]
        return self._beats.waits()

    @property
    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of each rank."""
        return dict(self._beats.last)

    @property
    def lead(self) -> Member | None:
        """The worker of rank 0, which writes the weights."""
        return self._parts[0].member if self._parts else None

    async def ended(self) -> Death | None:
        """Place the ranks and wait for the group's end: None for a clean one. RunError where there are never enough."""
        await self._place()
        while True:
            ends = [self._end_of(part) for part in self._parts]
            if all(end == "" for end in ends):
                self._clean = True
                return None
            if any(ends):
                return await self._cause()
            if any(map(_prepares, self._parts)):
                self._beats.start()  # a host may fetch a large model for long, which it bounds by itself
            elif hangs := self._beats.hangs():
                return Death(1, f"{hangs}; the group was ended", own=False)
            await asyncio.sleep(_POLL)

    async def stop(self) -> None:
        """End the ranks. After a clean end their hosts keep the last weights until the next task, or the run's end."""
        self._over = True
        for commit in self._commits:
            commit.cancel()
        async with self._renaming:  # one that is about to be whole becomes so before the next group looks for it
            pass
        if not self._clean:
            for part in self._parts:
                if part.member.task is not None and part.member.task.generation == part.generation:
                    part.member.task = None

    async def commit(self, asked: CommitRequest, checkpoints: Path) -> Path:
        """Fetch every host's part of a checkpoint and make it whole.

        TransferFailed or MemberGone where a host is gone; nothing is made whole once the group has been stopped.
        """
        aside = checkpoint.aside(checkpoints, asked.step)
        await asyncio.to_thread(_fresh, aside)
        if self._over:  # stopped meanwhile: nobody would end what begins now
            raise TransferFailed(_OVER)
        fetching = asyncio.ensure_future(self._fetch_parts(asked.step, aside))
        self._commits.add(fetching)
        try:
            await asyncio.wait((fetching,))
        finally:
            fetching.cancel()
            self._commits.discard(fetching)
        if not fetching.cancelled():
            fetching.result()
        async with self._renaming:
            if self._over:
                raise TransferFailed(_OVER)
            made = await asyncio.to_thread(checkpoint.commit, checkpoints, asked.step, asked.content, keep=asked.keep)
        return made.path

    async def fetch_weights(self, name: str, target: Path) -> Listing:
        """Have what rank 0 wrote as `name` in `target`. WeightsLost where its host or the group is gone.

        While both live a broken transfer is tried again: the trainer waits until its weights are out.
        """
        lead = self._parts[0].member
        until = time.monotonic() + 3 * self._hub.options.lost_seconds + QUIET_SECONDS
        while True:
            try:
                return await while_there(lead, fetch(self._hub.http, [lead.join.address], name, target))
            except MemberGone as error:
                raise WeightsLost(str(error)) from error
            except TransferFailed as error:
                if self._over and not self._clean:
                    raise WeightsLost(str(error)) from error
                if time.monotonic() > until:
                    raise EngineError(f"{name} did not come from {lead.name}, which is there: {error}") from error
            await asyncio.sleep(_RETRY)

    async def _fetch_parts(self, step: int, aside: Path) -> None:
        parts = [
            asyncio.ensure_future(
                while_there(
                    part.member,
                    fetch(self._hub.http, [part.member.join.address], f"checkpoint-{step}", aside, merge=True),
                )
            )
            for part in self._parts
        ]
        try:
            await asyncio.gather(*parts)
        finally:
            for waiting in parts:
                waiting.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    # --- placing

    async def _place(self) -> None:
        wanted = self.job.train.ranks
        deadline = time.monotonic() + self._hub.options.wait_seconds
        while not (chosen := self._choice(wanted)):
            if time.monotonic() > deadline:
                raise RunError(self._too_few())
            await asyncio.sleep(_POLL)
        lead, given = chosen[0], 0
        for member in chosen:
            ranks = tuple(range(given, min(given + member.join.slots, wanted)))
            given += len(ranks)
            generation = self._hub.generation()
            member.task = TrainerTask(
                generation=generation,
                job=self.job.model_dump(mode="json", exclude_unset=True),
                token=self._token,
                ranks=ranks,
                world=wanted,
                master=lead.join.host,
                port=lead.beat.port,
                shared=self._hub.options.shared_disk,
                model=self._source("base", self.job.model_dir),
                reference=self._source("reference", self.job.algorithm.reference)
                if self.job.algorithm.reference is not None
                else None,
                resume=self._source(f"resume-{self.job.incarnation}", self.job.resume)
                if self.job.resume is not None
                else None,
            )
            self._parts.append(_Part(member, generation))
        self._beats.start()

    def _source(self, name: str, folder: Path) -> Source:
        name = f"{name}-{self._hub.nonce}"
        if not self._hub.options.shared_disk:
            self._hub.shelf.put(name, folder)
        return Source(name=name, urls=(self._hub.url,))

    def _choice(self, wanted: int) -> list[Member]:
        """As few workers as hold the group, those that have beaten since they joined; none where there are too few."""
        there = [m for m in self._hub.members("trainer") if m.beat.port]
        there.sort(key=lambda member: -member.join.slots)
        for count in range(1, len(there) + 1):
            if slots(there[:count]) >= wanted:
                return there[:count]
        return []

    def _too_few(self) -> str:
        members = self._hub.members("trainer")
        return (
            f"{self.job.train.ranks} trainer ranks are wanted (train.ranks), {len(members)} workers with "
            f"{slots(members)} joined; start more: agentrl worker --role trainer --conductor {self._hub.url}"
        )

    # --- how it ends

    def _end_of(self, part: _Part) -> str | None:
        """None while it runs, "" after a clean end, else the cause."""
        member = part.member
        if member.gone:
            return f"{member.name} is lost: {member.gone}"
        if member.beat.generation != part.generation or member.beat.state != "ended":
            return None
        return member.beat.text or f"{member.name} ended with code {member.beat.code}" if member.beat.code else ""

    async def _cause(self) -> Death:
        """Why it died. Ranks complain when a host is lost, often before that is known: it is waited for."""
        until = time.monotonic() + self._hub.options.lost_seconds + 1.0
        while time.monotonic() < until and not any(p.member.gone for p in self._parts):
            if all(time.monotonic() - p.member.heard < 1.5 for p in self._parts) and self._all_ended():
                break
            await asyncio.sleep(_POLL)
        if lost := [self._end_of(p) for p in self._parts if p.member.gone]:
            return Death(1, "; ".join(str(text) for text in lost), own=False)
        texts = [text for p in self._parts if (text := self._end_of(p))]
        for part in self._parts:
            if text := self._end_of(part):
                self._keep_log(f"{part.member.name}, ranks of generation {part.generation}:\n{text}\n")
        code = next((p.member.beat.code for p in self._parts if p.member.beat.code), 1)
        # A host whose ranks only lost the others' is not the cause, where another one is.
        text = min(texts, key=lambda told: is_consequence(told.partition("\n")[0]))
        return Death(code or 1, text, own=(code or 1) < 128)

    def _all_ended(self) -> bool:
        return all(self._end_of(part) is not None for part in self._parts)


def _prepares(part: _Part) -> bool:
    """Whether the host has not started its ranks yet."""
    beat = part.member.beat
    return beat.generation != part.generation or beat.state == "preparing"


def _fresh(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
