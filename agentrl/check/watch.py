"""Sees what an environment does to its process: calls that block the event loop, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import select
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from agentrl.check.findings import Code, Findings
from agentrl.check.written import written

_STDLIB = sysconfig.get_path("stdlib")
_SITE = sysconfig.get_path("purelib")
_OURS = str(Path(__file__).resolve().parent)
_CALLING = str(Path(__file__).resolve().parent.parent / "calling.py")
_ALWAYS = {time.sleep, select.select, os.system, os.wait, input, socket.getaddrinfo}
_ON_SOCKETS = frozenset({"connect", "accept", "recv", "recv_into", "recvfrom", "send", "sendall"})


class Watch:
    """Watches the thread of the event loop while a coroutine of the environment runs.

    It asks the interpreter to be told of each call of a C function, which is where every blocking call ends up: no
    clock is involved, so a slow machine is no finding.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._where = ""
        self.active = True

    @contextmanager
    def on(self, where: str) -> Iterator[None]:
        """Watch what runs inside."""
        if not self.active:
            yield
            return
        self._where = where
        known = sys.getprofile()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(known)

    def _event(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or not _blocks(function, frame):
            return
        place = _place(frame)
        if place is not None:
            name = f"{getattr(function, '__module__', None) or type(function.__self__).__name__}.{function.__name__}"
            self._findings.add(Code.BLOCKS, f"{self._where} calls {name.lstrip('_')} in the event loop, at {place}")


def _blocks(function: Any, frame: FrameType) -> bool:
    name: str = function.__name__
    if name in ("sleep", "select", "system", "wait", "input", "getaddrinfo"):
        return function in _ALWAYS or (name == "getaddrinfo" and function.__module__ == "_socket")
    if name in _ON_SOCKETS:
        owner = function.__self__
        return isinstance(owner, socket.socket) and owner.gettimeout() != 0
    code = frame.f_code
    if name in ("waitpid", "poll"):
        # Popen.wait and communicate; Popen.poll only looks.
        return code.co_name == "_try_wait" or (name == "poll" and _called_from(frame, "_communicate"))
    # A condition that waits; a thread's start waits for it too, and is short.
    waits = name == "acquire" and code.co_name == "wait" and code.co_filename.endswith("threading.py")
    return waits and not (_called_from(frame, "start") or _called_from(frame, "_adjust_thread_count"))


def _called_from(frame: FrameType | None, name: str) -> bool:
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str | None:
    """The nearest line that is not the standard library's; None where the loop itself, or we, made the call."""
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "_run_once" or file.startswith(_OURS) or file == _CALLING:
            return None
        if not file.startswith(_STDLIB) or file.startswith(_SITE):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class Belongings(NamedTuple):
    """What a process has at a moment."""

    tasks: set[asyncio.Task[Any]]
    threads: set[str]
    processes: set[int]
    files: set[str]
    temporary: set[str]


def belongings(folder: str) -> Belongings:
    """What is there now; open files and processes where the system tells (Linux)."""
    return Belongings(
        {task for task in asyncio.all_tasks() if task is not asyncio.current_task()},
        {_thread(thread) for thread in threading.enumerate() if not thread.name.startswith("env-")},
        _children(),
        _open_files(),
        set(os.listdir(folder)) | written().left(),
    )


def report_growth(before: Belongings, after: Belongings, episodes: int, findings: Findings) -> None:
    """What every episode left. What all of them share is there once, or was there before."""
    for code, what, old, new in (
        (Code.LEAKED_TASK, "tasks", before.tasks, after.tasks),
        (Code.LEAKED_THREAD, "threads", before.threads, after.threads),
        (Code.LEAKED_PROCESS, "processes", before.processes, after.processes),
        (Code.LEAKED_FILE, "open files", before.files, after.files),
        (Code.LEAKED_TEMPORARY, "files that they made", before.temporary, after.temporary),
    ):
        left: set[Any] = set(new) - set(old)
        # More than before, too: a pool replaces what it lends, and is no larger for it.
        if min(len(left), len(new) - len(old)) >= episodes:
            named = sorted(_name(thing) for thing in left)[:3]
            findings.add(code, f"{episodes} closed episodes left {len(left)} {what}: {', '.join(named)}")


def _name(thing: Any) -> str:
    if isinstance(thing, asyncio.Task):
        return repr(thing.get_coro())
    return str(thing)


def _thread(thread: threading.Thread) -> str:
    # An executor starts workers one by one as it likes: all of them are one thing, which is shared or leaked.
    executor = re.fullmatch(r"(.+)_\d+", thread.name)
    return executor[1] if executor else f"{thread.name} {thread.ident}"


def _children() -> set[int]:
    found: set[int] = set()
    for entry in _listed("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                text = file.read()
        except OSError:
            continue  # it ended meanwhile
        state, parent = text.rpartition(")")[2].split()[:2]
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(entry))
    return found


def _open_files() -> set[str]:
    found = set()
    for number in _listed("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            continue  # the one of the listing itself
    return found


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


@contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder of its own for everything that `tempfile` makes meanwhile; what is made elsewhere is noted."""
    known, folder = tempfile.tempdir, tempfile.mkdtemp(prefix="agentrl-check-")
    tempfile.tempdir = folder
    try:
        with written().beside(folder):
            yield folder
    finally:
        tempfile.tempdir = known
        shutil.rmtree(folder, ignore_errors=True)


def end_processes(children: set[int]) -> None:
    """Kill what the checked environment left, so that a check leaves nothing."""
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            continue  # ended, and waited for by somebody else
