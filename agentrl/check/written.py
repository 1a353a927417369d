"""Sees which files and folders this process makes, wherever: what an environment leaves beside `tempfile`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_DESTINATION = {"os.rename": 1, "os.link": 1, "os.symlink": 1, "os.mkdir": 0, "sqlite3.connect": 0}
"""Which argument of an audit event names what it makes."""
_NOT_ONES_OWN = ("/proc/", "/dev/", "/sys/")


class Written:
    """Paths that were made while it was switched on; those of `folder` are left out.

    An audit hook cannot be taken off again, so there is one a process, and it does nothing while nobody looks.
    """

    def __init__(self) -> None:
        self._folder: str | None = None
        self._paths: set[str] = set()
        sys.addaudithook(self._hear)

    @contextmanager
    def beside(self, folder: str) -> Iterator[None]:
        """Look while the block runs."""
        self._paths, self._folder = set(), os.path.join(os.path.abspath(folder), "")
        try:
            yield
        finally:
            self._folder = None

    def left(self) -> set[str]:
        """Those that are still there."""
        return {path for path in list(self._paths) if os.path.lexists(path)}

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._folder is None:
            return
        if event == "open":
            path, _, flags = arguments
            if not (isinstance(flags, int) and flags & _WRITES):
                return
        elif event in _DESTINATION:
            path = arguments[_DESTINATION[event]]
        else:
            return
        if isinstance(path, bytes | os.PathLike):
            path = os.fsdecode(path)
        if isinstance(path, str):
            self._note(os.path.abspath(path))

    def _note(self, path: str) -> None:
        assert self._folder is not None
        # Compiled modules are written for everybody who comes after.
        ours = not path.startswith((self._folder, *_NOT_ONES_OWN)) and "/__pycache__/" not in path
        if ours and path not in self._paths and not os.path.lexists(path):
            self._paths.add(path)


@functools.cache
def written() -> Written:
    """This process's own."""
    return Written()
