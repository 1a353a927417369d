"""The fork server of a box: starts programs, watches them, kills what they leave. Standard library only, Python >= 3.9.

It runs inside the box as root of it (or as its first process), reads requests from the pipe that was its stdin and
answers on the one that was its stdout: `>II` lengths, a JSON header, bytes. A program is a fork of this warm
interpreter (`python3 file.py`, `python3 -c code`), or that and an exec, and gives up every right in between
(`confine`). When the pipe closes, the owner is dead: everything is killed and the box ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import struct
import sys
import time
from typing import Any, NamedTuple

from agentrl.sandbox import confine, program
from agentrl.sandbox.confine import Config

WARM = (
    "argparse array bisect calendar collections copy csv dataclasses datetime decimal enum fractions functools "
    "hashlib heapq inspect io itertools json linecache math operator os queue random re "
    "statistics string subprocess tempfile textwrap threading time traceback typing unittest uuid"
)
"""Imported before the first fork: what small programs import most."""
CHUNK = 1 << 16
SWEEP_SECONDS = 10.0
_ALL = 0x40000000
"""__WALL of waitpid: also children whose end is told by another signal than SIGCHLD, or by none."""


class Ended(NamedTuple):
    """How a child ended."""

    code: int
    out: bytes
    err: bytes
    timed_out: bool
    truncated: bool
    swept: bool
    setup: bytes


class Box(NamedTuple):
    """What the server made ready: what is computed for each program is paid for in pages copied from its fork."""

    config: Config
    control: int
    answers: int
    """The pipes to the owner."""
    confinement: confine.Confinement
    memory: int | None
    """The cgroup's file with the count of kills for memory."""
    kernel: tuple[int, ...]
    """Files that list what System V calls leave in the kernel."""


class OwnerGone(Exception):
    """The pipe to the owner closed."""


def main(control: int, answers: int, config: Config) -> int:
    """Serve until the owner is gone. In a forked warm program it returns that program's exit code."""
    if config.namespace and os.getpid() > 100:
        raise RuntimeError(f"process {os.getpid()} is not in a namespace of its own: it would kill its host")
    confine.become_reaper()
    confine.spare_from_oom()
    for folder in config.writable if config.mounts else ():
        os.makedirs(folder, exist_ok=True)
        confine.mount_tmpfs(folder, config.disk, config.inodes, _owner(config))
    if not config.mounts:
        for folder in config.writable:
            _own(folder, config)
    config = config._replace(env={"PATH": os.environ.get("PATH", os.defpath), **config.env})
    os.environ.clear()
    os.environ.update(config.env)
    for name in WARM.split():
        importlib.import_module(name)
    for name in [known for known in sys.modules if known.split(".")[0] == "agentrl"]:
        del sys.modules[name]  # programs are not to see them
    memory = [_opened(path) for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")]
    kernel = [_opened(f"/proc/sysvipc/{kind}") for kind in ("shm", "msg", "sem")] if config.namespace else []
    known = next((file for file in memory if file is not None), None)
    lists = tuple(file for file in kernel if file is not None)
    box = Box(config, control, answers, confine.Confinement(config), known, lists)
    _freeze()  # before the practice too, which collects often
    program.practise()
    _freeze()
    send(answers, {"ready": True})
    try:
        while True:
            header, body = receive(control)
            forked = _answer(header, body, box)
            if forked is not None:
                return forked()
    except OwnerGone:
        _sweep(config)
        return 0


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def receive(control: int) -> tuple[dict[str, Any], bytes]:
    """One request; OwnerGone at the end of the pipe."""
    head, size = struct.unpack(">II", _exactly(control, 8))
    return json.loads(_exactly(control, head)), _exactly(control, size)


def send(answers: int, header: dict[str, Any], body: bytes = b"") -> None:
    """One answer."""
    text = json.dumps(header).encode()
    rest = memoryview(struct.pack(">II", len(text), len(body)) + text + body)
    while rest:
        try:
            rest = rest[os.write(answers, rest) :]
        except BrokenPipeError:
            raise OwnerGone from None


def _exactly(control: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(control, min(size, 1 << 20))
        if not part:
            raise OwnerGone
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _answer(header: dict[str, Any], body: bytes, box: Box) -> program.Program | None:
    if header["op"] == "reset":
        send(box.answers, {"clean": _reset(box)})
        return None
    pipes = [os.pipe() for _ in range(4)]  # stdin, stdout, stderr, setup
    killed_before = _oom_kills(box)
    try:
        pid = program.fork()
    except OSError as error:
        _close_all(pipes)
        send(box.answers, {"lost": f"cannot fork: {error}"})
        return None
    if pid == 0:
        return program.child(header, pipes, box.config, box.confinement)
    for inner in (pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1]):
        os.close(inner)
    ended = _watch(pid, [pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][0]], header, body, box)
    oom = _oom_kills(box) > killed_before
    if not box.config.cgroup and ended.code != 0:
        last = ended.err.rstrip().rsplit(b"\n", 1)[-1]
        oom = last.startswith(b"MemoryError") or (ended.code == 137 and not (ended.timed_out or ended.truncated))
    answer: dict[str, Any] = {
        "code": ended.code,
        "timed_out": ended.timed_out,
        "truncated": ended.truncated,
        "oom": oom,
    }
    answer.update(swept=ended.swept, out=len(ended.out), setup=ended.setup.decode("utf-8", "replace"))
    send(box.answers, answer, ended.out + ended.err)
    return None


# The parent's side.


def _watch(pid: int, ends: list[int], header: dict[str, Any], body: bytes, box: Box) -> Ended:
    """Feed and read the child until it ends, time runs out, a stream is over its cap, or the owner is gone."""
    cap, control, deadline = header.get("cap", box.config.output), box.control, time.monotonic() + header["timeout"]
    stdin, stdout, stderr, setup = ends
    caught: dict[int, bytearray] = {stdout: bytearray(), stderr: bytearray()}
    poll, ended, rest = select.poll(), os.pidfd_open(pid), memoryview(body)
    for end in ends:
        os.set_blocking(end, False)
    for end in (ended, control, stdout, stderr):
        poll.register(end, select.POLLIN)
    poll.register(stdin, select.POLLOUT)
    open_ends, over, timed_out, gone = {stdin, stdout, stderr}, False, False, False
    # Never wait for the end of the pipes: whoever outlives the program may hold them open.
    while not (over or timed_out or gone):
        left = deadline - time.monotonic()
        ready = dict(poll.poll(max(0.0, left) * 1000 + 1))
        for end in open_ends & set(ready):
            if end == stdin:
                rest = _feed(stdin, rest)
                alive = len(rest) > 0
            else:
                alive = _catch(end, caught[end], cap)
                over = over or len(caught[end]) > cap
            if not alive:
                poll.unregister(end)
                open_ends.discard(end)
                os.close(end)
        if ended in ready:
            break
        # After the deadline it is looked at once more: it may have ended while nothing ran here.
        gone, timed_out = control in ready, left <= 0
    statuses: dict[int, int] = {}
    swept = _sweep(box.config, pid, statuses)
    for end in open_ends - {stdin}:
        while not over and _catch(end, caught[end], cap, once=True):
            over = len(caught[end]) > cap
    told = _read_setup(setup)
    for end in (*open_ends, setup, ended):
        os.close(end)
    if gone:
        raise OwnerGone
    code = statuses.get(pid, 9)
    code = 128 + os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)
    out, err = bytes(caught[stdout][:cap]), bytes(caught[stderr][:cap])
    return Ended(code, out, err, timed_out, over, swept, told)


def _feed(stdin: int, rest: memoryview) -> memoryview:
    try:
        return rest[os.write(stdin, rest[:CHUNK]) :] if rest else rest
    except BlockingIOError:
        return rest
    except OSError:
        return rest[:0]


def _catch(end: int, caught: bytearray, cap: int, once: bool = False) -> bool:
    """Read what is there; False at the end of the stream (or, with `once`, when nothing is left)."""
    try:
        part = os.read(end, CHUNK)
    except BlockingIOError:
        return not once
    caught += part[: cap + 1 - len(caught)]
    return bool(part) and (not once or len(caught) <= cap)


def _read_setup(setup: int) -> bytes:
    try:
        return os.read(setup, 4096)
    except BlockingIOError:
        return b""


def _sweep(config: Config, main: int = 0, statuses: dict[int, int] | None = None) -> bool:
    """Collect every process but this one, and kill what is left; False when some would not go."""
    until = time.monotonic() + SWEEP_SECONDS
    while True:
        # Orphans come to this process before their parent can be collected: no child means that nothing is left.
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | _ALL)
                if pid == 0:
                    break
                if statuses is not None:
                    statuses[pid] = status
        except ChildProcessError:
            return True
        if time.monotonic() > until:
            return False
        _kill_all(config, main)
        time.sleep(0.0002)


def _kill_all(config: Config, main: int) -> None:
    if config.namespace:
        _kill(-1)
        return
    for pid in _descendants():
        _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _descendants() -> list[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found: list[int] = []
    family = {os.getpid()}
    while True:
        more = [pid for pid, parent in parents.items() if parent in family and pid not in family]
        if not more:
            return found
        found += more
        family |= set(more)


def _oom_kills(box: Box) -> int:
    if box.memory is None:
        return 0
    words = os.pread(box.memory, 4096, 0).split()
    return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _reset(box: Box) -> bool:
    """Make the box as new for the next user; False when it cannot be."""
    config = box.config
    if not _sweep(config) or any(os.pread(file, 4096, 0).count(b"\n") > 1 for file in box.kernel):
        return False
    try:
        for folder in config.writable:
            if config.mounts and os.listdir(folder):
                confine.mount_tmpfs(folder, config.disk, config.inodes, _owner(config))
            elif not config.mounts:
                _empty(folder)
                _own(folder, config)
    except (OSError, RecursionError):
        return False
    return True


def _empty(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _owner(config: Config) -> int:
    return os.getuid() if config.uid is None else config.uid


def _own(folder: str, config: Config) -> None:
    if config.uid is not None:
        os.chown(folder, config.uid, config.uid)
    os.chmod(folder, 0o700)


def _close_all(pipes: list[tuple[int, int]]) -> None:
    for pair in pipes:
        for end in pair:
            os.close(end)
