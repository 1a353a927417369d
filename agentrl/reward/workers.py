"""Functions with a hard deadline: warm worker processes that are killed and replaced when one hangs.

Works the same from any thread, from a forked or pooled process and (`acall`) from asyncio: nothing here uses signals
in the caller's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import queue
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple, TypeVar

from agentrl.child import LOGS_VARIABLE
from agentrl.errors import ContractError, DeadlineExceeded, InfrastructureError

Result = TypeVar("Result")

START_SECONDS = 120.0
"""For a new worker to start and import what it needs, before its first call's time begins."""
STRETCH = 10.0
"""A call that is measured by its CPU time may take this many times as long by the clock."""


class _Place(NamedTuple):
    """A place for a worker; None where the next call starts one. Its number is that of its log."""

    number: int
    worker: subprocess.Popen[bytes] | None


class NoWorker(InfrastructureError):
    """No worker could begin the call: all were busy, or a new one did not start. It says nothing of what was asked."""


class WorkerLost(InfrastructureError):
    """The worker died by itself in a call: killed from outside, out of memory, or a crash."""


class CallFailed(ContractError):
    """The function raised; `kind` is the exception's class name."""

    def __init__(self, function: str, kind: str, message: str) -> None:
        super().__init__(f"{function} raised {kind} in its worker: {message}")
        self.kind = kind


class WorkerPool:
    """`size` processes that call functions by dotted path. Arguments and results are JSON (dataclasses become dicts).

    ```python
    with WorkerPool(2) as pool:
        pool.call("my.module:slow_check", answer, row, seconds=5.0)
    ```

    A call that misses its deadline costs its worker, and no other call. `queue_seconds` bounds the wait for a free one.
    With `by_cpu` the deadline is in seconds of the worker's CPU (and ten times as many by the clock): for what only
    computes, so that what comes of it does not depend on what else the machine does.
    """

    def __init__(self, size: int = 2, *, memory_mb: int = 4096, queue_seconds: float = 120.0) -> None:
        if size < 1:
            raise ContractError(f"a worker pool of {size} processes: at least 1 is needed")
        self.size = size
        self.queue_seconds = queue_seconds
        self.replaced = 0
        self._memory_mb = memory_mb
        self._live: set[subprocess.Popen[bytes]] = set()
        self._places: queue.LifoQueue[_Place] = queue.LifoQueue()
        numbers = _numbers(os.getpid())
        for _ in range(size):
            self._places.put(_Place(next(numbers), None))
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="reward-worker")
        self._finalize = weakref.finalize(self, _end, self._live, os.getpid())

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; calls that run fail with WorkerLost."""
        self._finalize()
        self._threads.shutdown(wait=False)

    def call(self, function: str, *args: Any, seconds: float, by_cpu: bool = False, **kwargs: Any) -> Any:
        """The function's result; DeadlineExceeded, NoWorker, WorkerLost, or CallFailed with what it raised."""
        request = {"function": function, "args": args, "kwargs": kwargs, "seconds": seconds, "by_cpu": by_cpu}
        line = json.dumps({**request, "warm": False}) + "\n"
        try:
            number, worker = self._places.get(timeout=self.queue_seconds)
        except queue.Empty:
            raise NoWorker(
                f"no reward worker was free within {self.queue_seconds:g} s ({self.size} in all): use a larger pool"
            ) from None
        reply: bytes | None = b""
        try:
            if worker is None:
                worker = self._start(number)
                reply = _warmed(worker, function)
            reply = None if reply is None else _exchange(worker, line.encode(), seconds, by_cpu)
        except BaseException:
            # Also on KeyboardInterrupt: a worker whose reply was not read cannot be used again.
            if worker is not None:
                self._kill(worker)
            self._places.put(_Place(number, None))
            raise
        if reply is None:
            code = self._kill(worker)
            self._places.put(_Place(number, None))
            raise WorkerLost(f"the worker of {function} died (exit code {code})")
        self._places.put(_Place(number, worker))
        answer = json.loads(reply)
        if "ok" in answer:
            return answer["ok"]
        raise CallFailed(function, answer["kind"], answer["error"])

    async def acall(self, function: str, *args: Any, seconds: float, by_cpu: bool = False, **kwargs: Any) -> Any:
        """`call` without blocking the event loop; a cancelled one still ends at its deadline."""
        return await self.arun(functools.partial(self.call, function, *args, seconds=seconds, by_cpu=by_cpu, **kwargs))

    async def arun(self, work: Callable[[], Result]) -> Result:
        """Run what makes calls of this pool in one of its threads: as many as there are workers."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        with _log_of(number) as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "agentrl.reward.worker", str(self._memory_mb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            )
        self._live.add(worker)
        return worker

    def _kill(self, worker: subprocess.Popen[bytes]) -> int:
        self.replaced += 1
        self._live.discard(worker)
        return _stop(worker)


def _log_of(number: int) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    """Where a worker's stderr goes: a run gives its processes a folder, elsewhere it is the caller's own."""
    folder = os.environ.get(LOGS_VARIABLE)
    if folder is None:
        return contextlib.nullcontext()
    os.makedirs(folder, exist_ok=True)
    return open(os.path.join(folder, f"reward-{number}.log"), "ab")


def _warmed(worker: subprocess.Popen[bytes], function: str) -> bytes | None:
    warm = json.dumps({"function": function, "warm": True}) + "\n"
    try:
        return _exchange(worker, warm.encode(), START_SECONDS)
    except DeadlineExceeded as error:
        raise NoWorker(f"a reward's worker did not start and import {function} within {START_SECONDS:g} s") from error


def _exchange(worker: subprocess.Popen[bytes], request: bytes, seconds: float, by_cpu: bool = False) -> bytes | None:
    """The worker's reply line; None where it died; DeadlineExceeded."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    left = _time_left(worker.pid, seconds, by_cpu)
    try:
        worker.stdin.write(request)
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    reader = worker.stdout.fileno()
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    reply = b""
    while not reply.endswith(b"\n"):
        while not poll.poll(1000 * max(left(), 0.0)):
            if left() <= 0:
                raise DeadlineExceeded(f"a reward's worker took longer than {seconds:g} s")
        chunk = os.read(reader, 65536)
        if not chunk:
            return None
        reply += chunk
    return reply


def _time_left(process: int, seconds: float, by_cpu: bool) -> Callable[[], float]:
    """How much of `seconds` is left, from now on; of the process's CPU, it is the least time that it will need."""
    began, used = time.monotonic(), _cpu_seconds(process) if by_cpu else None

    def left() -> float:
        spent = time.monotonic() - began
        now = _cpu_seconds(process) if used is not None and spent < STRETCH * seconds else None
        return seconds - (spent if used is None or now is None else now - used)

    return left


def _cpu_seconds(process: int) -> float | None:
    """What its threads have computed; None where the system does not tell, or it is gone."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stop(worker: subprocess.Popen[bytes]) -> int:
    worker.kill()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    return worker.wait()


def _end(live: set[subprocess.Popen[bytes]], owner: int) -> None:
    # A forked child inherits the set but not the workers.
    if os.getpid() == owner:
        while live:
            _stop(live.pop())


def shared_pool() -> WorkerPool:
    """This process's own pool, made at first use: a forked process gets another one."""
    return _pool_of(os.getpid())


@functools.cache
def _pool_of(process: int) -> WorkerPool:
    return WorkerPool(min(8, os.cpu_count() or 1))


@functools.cache
def _numbers(process: int) -> Iterator[int]:
    """Numbers of places, over all pools of a process."""
    return itertools.count()
