"""SIGTERM and SIGINT as a request to end at the next step, or at once where the rank only waits for a batch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class _Asked(Exception):
    """Raised out of an interruptible wait."""


class Stop:
    """Whether the process was told to stop. Lives in the main thread."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False

    def listen(self) -> None:
        """Take the signals over."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A wait that the signal ends at once; look at `asked` afterwards."""
        self._waiting = True
        try:
            if self.asked:
                raise _Asked
            yield
        except _Asked:
            pass
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = True
        if self._waiting:
            self._waiting = False
            raise _Asked
