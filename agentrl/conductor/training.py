"""The trainer's side of a run, set up once for both kinds: its feed, its supervisor, and the watchdog over both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from agentrl.conductor.config import RunConfig, SftConfig
from agentrl.conductor.desk import Desk
from agentrl.conductor.feed import BatchSource, CommitRequest, FeedServer, Trace, TrainerEvents
from agentrl.conductor.supervise import Begin, MakeGroup, Supervisor
from agentrl.conductor.watchdog import Watchdog
from agentrl.train.options import TrainerJob


class Training:
    """`feed` serves what `source` has and tells `events`; `supervisor` keeps the ranks; `watchdog` looks at both.

    `url` is the feed's, to be set once it listens. `hand_over` is whether each step's weights are written for engines;
    with `on_trace` the trainer tells what it made of its tokens.
    """

    def __init__(
        self,
        config: SftConfig | RunConfig,
        desk: Desk,
        weights: Path,
        *,
        source: BatchSource,
        events: TrainerEvents,
        begin: Begin,
        done: Callable[[], bool],
        hand_over: bool,
        on_trace: Callable[[Trace], None] | None = None,
        on_commit: Callable[[CommitRequest], Awaitable[Path]] | None = None,
        make_group: MakeGroup | None = None,
        routes: Callable[[web.Application], None] | None = None,
    ) -> None:
        self._config, self._desk, self._weights = config, desk, weights
        self._hand_over, self._trace = hand_over, on_trace is not None
        self.url = ""
        self.feed = FeedServer(source, events, on_trace=on_trace, on_commit=on_commit, routes=routes)
        self.watchdog = Watchdog(config.monitor.stall_seconds, desk.note)
        self.supervisor = Supervisor(
            desk,
            self.feed,
            self._job,
            begin,
            done,
            restarts=config.monitor.trainer_restarts,
            silent_seconds=config.monitor.silent_seconds,
            make_group=make_group,
        )
        self.watchdog.probe(self.supervisor.waits)

    def _job(self, incarnation: int, checkpoint: Path | None) -> TrainerJob:
        return TrainerJob(
            run=self._config.name,
            train=self._config.train,
            algorithm=self._config.algorithm,
            model_dir=self._config.model.absolute(),
            feed_url=self.url,
            weights_dir=self._weights,
            checkpoints_dir=self._desk.folder.checkpoints,
            seed=self._config.seed,
            incarnation=incarnation,
            resume=checkpoint,
            hand_over=self._hand_over,
            trace=self._trace,
        )
