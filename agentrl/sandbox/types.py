"""The contract of a sandbox: run a program that nobody trusts, and say exactly how it ended.

A *box* holds one episode's files and runs one program at a time. A failed command is data (`ExecResult`); a box that is
gone raises `SandboxLost`, an infrastructure fault, and says nothing about the program that ran in it. A *pool* keeps
warm boxes and hands each one to one user at a time; what a user leaves in a box never reaches the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol


class ExecResult(NamedTuple):
    """How a program ended. All of it is the program's doing: a policy's fault, never an infrastructure fault."""

    returncode: int
    """The exit code; 128 + the signal that ended it (137: SIGKILL); 127 not found, 126 not runnable."""
    stdout: bytes
    stderr: bytes
    """What was written until the end, the time-out or the cap, whichever came first: partial output is kept."""
    timed_out: bool = False
    """It was killed because `timeout` ran out. The clock starts when the program starts."""
    oom: bool = False
    """A process of it was killed for memory (without cgroups: it ended with a MemoryError)."""
    truncated: bool = False
    """It wrote more than the cap to one stream and was killed for it."""

    @property
    def ok(self) -> bool:
        """Ended by itself with exit code 0, within every limit."""
        return self.returncode == 0 and not (self.timed_out or self.oom or self.truncated)

    @property
    def stdout_text(self) -> str:
        """Standard output as text; bytes that are no UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Standard error as text; bytes that are no UTF-8 become U+FFFD."""
        return self.stderr.decode("utf-8", "replace")


class Sandbox(Protocol):
    """One box: a place with its own files where programs run.

    Example:
        async with open_sandbox(SandboxOptions(kind="bubblewrap")) as pool, pool.box() as box:
            await box.write_file("main.py", b"print(input())")
            result = await box.exec(["python3", "main.py"], stdin=b"hello", timeout=2.0)
            assert result.ok and result.stdout == b"hello\\n"
    """

    workdir: str
    """Where relative paths start and programs run; the only place, with /tmp, that is sure to be writable."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 10.0,
    ) -> ExecResult:
        """Run `argv` (no shell) until it ends or `timeout` seconds after it started; nothing of it is left running.

        `env` is laid over a small fixed environment (PATH, HOME, UTC, C.UTF-8, hash seed 0); nothing of the caller's
        own is passed on. Programs of one box run one after another. Cancelling the call loses the box.
        Raises SandboxLost when the box is gone; ValueError, as files do, for words that no program can be given (NUL
        bytes, half a surrogate pair); OSError where `cwd` cannot be entered.
        """
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file with the program's rights, making its folders; OSError (no space, …) as ever."""
        ...

    async def read_file(self, path: str) -> bytes:
        """Read a regular file with the program's rights; a symbolic link at the path's end is refused (OSError)."""
        ...

    async def close(self) -> None:
        """Kill what runs and remove the box; safe to repeat."""
        ...


class SandboxPool(Protocol):
    """Warm boxes of one kind. `box()` waits its turn (first come, first served), and cleans up behind its user."""

    def box(self) -> AbstractAsyncContextManager[Sandbox]:
        """A clean box for one episode; raises SandboxLost when none can be started."""
        ...

    async def close(self) -> None:
        """Remove every box; safe to repeat."""
        ...

    async def __aenter__(self) -> SandboxPool: ...

    async def __aexit__(self, *exc: object) -> None: ...
