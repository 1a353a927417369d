"""What every part of a run writes to: its folder, its metrics, the person who watches, and the log."""

from __future__ import annotations

import logging
from typing import NamedTuple

from agentrl.conductor.folder import RunFolder
from agentrl.monitor.live import View
from agentrl.monitor.metrics import MetricsFile


class Desk(NamedTuple):
    """What every part of a run writes to."""

    folder: RunFolder
    metrics: MetricsFile
    view: View
    log: logging.Logger

    def note(self, text: str) -> None:
        """One sentence for the person and the log."""
        self.log.info(text)
        self.view.note(text)


def open_log(folder: RunFolder) -> logging.Logger:
    """logs/conductor.log, for tracebacks and everything that was noted."""
    log = logging.getLogger(f"agentrl.run.{folder.path}")
    log.propagate = False
    log.setLevel(logging.INFO)
    handler = logging.FileHandler(folder.logs / "conductor.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    return log


def close_log(log: logging.Logger) -> None:
    """Close its file."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
