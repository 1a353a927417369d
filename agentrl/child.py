"""Child processes that never outlive the conductor and always say how they ended.

A child is started through a small guard (`python -m agentrl.child FD command …`) that holds the read end of a pipe
whose write end only the parent has. When the parent dies, however it dies, the pipe closes and the guard kills the
child's whole process group. The guard leads that group, so a stop reaches grandchildren (torchrun's ranks, SGLang's
scheduler) too.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from agentrl.errors import ConfigError

LOGS_VARIABLE = "AGENTRL_LOGS"
"""In the environment: the folder for logs of what a process starts for itself, such as workers for rewards."""
RANK_LOGS_VARIABLE = "AGENTRL_RANK_LOGS"
"""In the environment of a trainer's ranks that share their starter's output: the folder for a log of each."""


class Child:
    """A running child process. `log` receives its stdout and stderr."""

    def __init__(self, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        read_end, self._lifeline = os.pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log_start = log.stat().st_size if log.exists() else 0
        """Where in the log this child's part begins."""
        with log.open("ab") as output:
            self._process = _spawn(read_end, self.argv, output, {**os.environ, **(env or {})})
        os.close(read_end)

    @property
    def pid(self) -> int:
        """The guard's process id, which is also the process group's."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for the end and return the exit code."""
        # Polled: the guard's exit is also seen by `poll`, and a child watcher would have to be shared with it.
        while (code := self._process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return code

    async def stop(self, grace: float = 5.0) -> int:
        """SIGTERM, then SIGKILL after `grace` seconds, to the whole group; returns the exit code."""
        if self._process.poll() is None:
            _signal_group(self.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.wait(), grace)
            except TimeoutError:
                pass
        self.kill()
        return await self.wait()

    def kill(self) -> None:
        """SIGKILL to the whole group, at once; safe to repeat."""
        _signal_group(self.pid, signal.SIGKILL)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log, for an error's text."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.log_start)
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(no log: {error})"


def gpu_environment(gpus: Sequence[int] | None) -> dict[str, str]:
    """What a child needs to see these GPUs alone; numbers count within $CUDA_VISIBLE_DEVICES where that is set.

    None is no restriction. ConfigError where a number is beyond those of that variable.
    """
    if gpus is None:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(max(gpus, default=0) + 1)]
    if beyond := [i for i in gpus if not 0 <= i < len(names)]:
        raise ConfigError(f"gpus = {list(gpus)}: there is no GPU {beyond[0]}, CUDA_VISIBLE_DEVICES = {visible!r}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in gpus)}


def _spawn(read_end: int, argv: Sequence[str], output: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.child", str(read_end), *argv],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(env),
        pass_fds=(read_end,),
        start_new_session=True,
    )


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def die_with_parent() -> None:
    """Have this process killed when its parent ends.

    For a grandchild in a session of its own, as torchrun's ranks are: a kill of the guard's group does not reach it,
    and one that is stopped would stay for ever.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def guard(read_end: int, argv: Sequence[str]) -> int:
    """Run `argv` until it ends or the parent's end of the pipe closes; the command's exit code."""
    # SIGTERM goes to the whole group: the child ends by itself and the guard reports its code. Before the child is
    # there, or one that comes at once would end the guard alone; and a handler, because a child inherits "ignored".
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(argv)
    os.set_inheritable(read_end, False)
    ended = os.pidfd_open(process.pid)
    ready, _, _ = select.select([read_end, ended], [], [])
    if ended in ready:
        code = process.wait()
        return code if code >= 0 else 128 - code
    os.killpg(os.getpgid(0), signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
