"""What publishes cost rollouts: how long they took, stopped the engines, and until the engines had work again."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.conductor.meter import MeteredEngine
from agentrl.conductor.publish import Published
from agentrl.engine.router import PublishReport
from agentrl.types import Version

RESUME_SECONDS = 5.0


class PublishGauge:
    """Figures of the last publish, for the step's metrics."""

    def __init__(self) -> None:
        self.count = 0
        self.last: dict[str, Any] = {}
        self._measuring: set[asyncio.Future[float | None]] = set()

    def published(
        self, done: Published[PublishReport], engine: MeteredEngine, carried: Version | None = None
    ) -> dict[str, Any]:
        """The engines just went on. The figures that are known now; `resume_ms` comes with the next step's metrics.
        `carried` is the last version that came over a process group.

        To be called before anything is awaited: what follows is part of what is measured.
        """
        resumed = asyncio.ensure_future(engine.resumed(RESUME_SECONDS))
        resumed.add_done_callback(self._note_resumed)
        self._measuring.add(resumed)
        self.count += 1
        figures = {
            "publish/seconds": done.seconds,
            "publish/pause_ms": 1e3 * done.report.pause_seconds,
            "publish/load_ms": 1e3 * done.report.load_seconds,
            "publish/stall_ms": 1e3 * done.report.stall_seconds,
            "publish/skipped": done.skipped,
            "publish/over_group": float(carried == done.version),
        }
        self.last |= figures
        return figures

    def longest_gap(self, milliseconds: float | None) -> None:
        """The longest time without a token since the last publish, its own stall included."""
        if milliseconds is not None and self.count:
            self.last["publish/longest_gap_ms"] = milliseconds

    def stop(self) -> None:
        """Measure no more."""
        for measuring in list(self._measuring):
            measuring.cancel()

    def _note_resumed(self, task: asyncio.Future[float | None]) -> None:
        """Written with the step's metrics: the next publish must not wait for rollouts that have nothing to ask."""
        self._measuring.discard(task)
        if not task.cancelled() and task.exception() is None and (seconds := task.result()) is not None:
            self.last["publish/resume_ms"] = 1e3 * seconds
