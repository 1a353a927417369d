"""Keeps a trainer alive: a dead group is started again from the newest whole checkpoint, under a new incarnation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from agentrl.conductor.cause import Death, remedy
from agentrl.conductor.desk import Desk
from agentrl.conductor.feed import CheckpointReady, FeedServer, Phase, StepMetrics
from agentrl.conductor.trainer import Group, TrainerGroup
from agentrl.conductor.watchdog import Wait
from agentrl.errors import RunError
from agentrl.train.checkpoint import Checkpoint, newest
from agentrl.train.options import TrainerJob
from agentrl.types import Version

MEMORY = "lower train.tokens_per_microbatch or train.max_sequence, set train.checkpointing, or give it more ranks"
MakeJob = Callable[[int, Path | None], TrainerJob]
"""From an incarnation and a checkpoint folder (None: from the start)."""
MakeGroup = Callable[[TrainerJob, str], Group]
"""From a job and its incarnation's token: the ranks start."""
Begin = Callable[[Version, Checkpoint | None], Awaitable[None]]
"""What must happen before the group of a new incarnation starts: the pool goes back to the checkpoint."""


class Supervisor:
    """One trainer at a time, until it ends cleanly or dies for good."""

    def __init__(
        self,
        desk: Desk,
        feed: FeedServer,
        make_job: MakeJob,
        begin: Begin,
        done: Callable[[], bool],
        *,
        restarts: int,
        silent_seconds: float = 90.0,
        make_group: MakeGroup | None = None,
    ) -> None:
        """Without `make_group` the ranks are children of this process."""
        self._desk = desk
        self._feed = feed
        self._make_job = make_job
        self._begin = begin
        self._done = done
        self._restarts = restarts
        self._silent_seconds = silent_seconds
        self._make_group = make_group or self._here
        self._left = restarts
        self._cause: str | None = None
        self.group: Group | None = None
        self.deaths = 0

    async def run(self) -> None:
        """Start it, start it again where it dies; returns after a clean end, raises RunError after the last death."""
        while True:
            death = await self._one()
            if death is None:
                return
            self.deaths += 1
            self._desk.log.error("%s", death.text)
            self._desk.metrics.write("fault", {"what": "trainer", "code": death.code, "error": death.text[:2000]})
            cause = _without_numbers(death.text.partition("\n")[0])
            if self._left == 0 or (death.own and cause == self._cause):
                raise RunError(f"{death.text}\n{self._remedy(death)}")
            self._left -= 1
            self._cause = cause
            self._desk.note(f"{death.text.partition(chr(10))[0]}; it is started again from the last checkpoint")

    def heard(self, phase: Phase) -> None:
        """A heartbeat."""
        if self.group is not None:
            self.group.heard(phase)

    def stepped(self, report: StepMetrics) -> None:
        """A step is done: the last death is overcome, though only a checkpoint gives its restarts back."""
        self._cause = None

    def saved(self, ready: CheckpointReady) -> None:
        """A checkpoint is whole: what came before will not be repeated."""
        self._left = self._restarts

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        return self.group.waits() if self.group is not None else ()

    async def stop(self) -> None:
        """End the group."""
        if self.group is not None:
            await self.group.stop()
            self.group = None

    async def _one(self) -> Death | None:
        incarnation = self._desk.folder.next_incarnation()
        checkpoint, refused = await asyncio.to_thread(newest, self._desk.folder.checkpoints)
        for reason in refused:
            self._desk.note(reason)
        # The feed first: a take that the dead group still waited for must not happen after the pool has gone back.
        await self._feed.begin(incarnation)
        await self._begin(Version(incarnation, checkpoint.number if checkpoint else 0), checkpoint)
        job = self._make_job(incarnation, checkpoint.path if checkpoint else None)
        self.group = self._make_group(job, self._feed.token)
        try:
            death = await self.group.ended()
            if death is None and not self._done():
                return Death(0, "the trainer ended before its last step: something told it to stop")
            return death
        finally:
            await self.stop()

    def _here(self, job: TrainerJob, token: str) -> TrainerGroup:
        folder = self._desk.folder
        log = folder.logs / "trainer.log"
        return TrainerGroup(job, folder.job, log, token, silent_seconds=self._silent_seconds)

    def _remedy(self, death: Death) -> str:
        logs = self._desk.folder.logs / "trainer*.log"
        return f"what to do: {remedy(death.text, MEMORY)} (all of it is in {logs}), then go on with --resume"


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)
