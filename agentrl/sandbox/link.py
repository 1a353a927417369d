"""The host's side of the fork server: a box is a pipe to it. Shared by every kind of box.

A kind of box starts `python3 -c BOOT` wherever programs shall run, and hands the process's two pipes over. The server's
code travels through them, so that nothing of the host has to be visible in the box.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandbox.confine import Config
from agentrl.sandbox.types import ExecResult

BOOT = """
import json, os, struct, sys, types
sys.path[:] = [p for p in sys.path if p]
def take(size):
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            sys.exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
plan = json.loads(take(struct.unpack(">I", take(4))[0]))
for name, source in plan["modules"]:
    module = types.ModuleType(name)
    module.__path__ = []
    sys.modules[name] = module
    if "." in name:
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    exec(compile(source, name, "exec"), module.__dict__)
os.set_inheritable(os.dup2(0, 10), False)
os.set_inheritable(os.dup2(1, 11), False)
null = os.open("/dev/null", os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1)
del take
server = sys.modules["agentrl.sandbox.server"]
sys.exit(server.main(10, 11, server.Config(**plan["config"])))
"""
AT_START = {"LD_BIND_NOW": "1"}
"""Environment of the server alone: what is bound lazily is bound, in pages that are copied, by each program again."""
SLACK = 20.0
"""Seconds beyond a program's own time-out after which a silent box counts as lost."""
FILE_SECONDS = 30.0
STOP_SECONDS = 10.0
"""For a fork server to end what runs, and itself; one that is killed before leaves programs that nobody ends."""


class Loss(NamedTuple):
    """What is known about a box that ended."""

    text: str
    oom: bool = False
    """The kernel killed in it for memory: what the program in it used up, so the program's doing."""


class LostToMemory(SandboxLost):
    """A box whose server ended, or did not answer, after the kernel killed in it for the memory that the box used."""


class Writer(Protocol):
    """Where requests go; asyncio.StreamWriter is one."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


def base_env(workdir: str, path: str | None) -> dict[str, str]:
    """The fixed environment of every program: the same hash seed, time zone and locale everywhere."""
    env = {"HOME": workdir, "TMPDIR": "/tmp", "TZ": "UTC", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    env |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return env | ({} if path is None else {"PATH": path})


class ServerBox:
    """A box that is reached through a fork server. `stop` removes it; `why` says what is known about a loss."""

    def __init__(
        self,
        name: str,
        config: Config,
        reader: asyncio.StreamReader,
        writer: Writer,
        stop: Callable[[], Awaitable[None]],
        why: Callable[[], Awaitable[Loss]],
    ) -> None:
        self.name = name
        self.workdir = config.workdir
        self.lost = False
        self.tainted = False
        """A limit was hit: the next user gets another box."""
        self.on_program: Callable[[str, float], None] = lambda end, seconds: None
        """Told of every program how it ended (`census.ENDS`) and how long that took."""
        self._config = config
        self._reader, self._writer, self._stop, self._why = reader, writer, stop, why
        self._turn = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None

    async def boot(self, seconds: float) -> None:
        """Send the server's code and wait until it is ready."""
        names = ("confine", "program", "server")
        modules = [["agentrl", ""], ["agentrl.sandbox", ""]]
        modules += [[f"agentrl.sandbox.{n}", (files("agentrl.sandbox") / f"{n}.py").read_text()] for n in names]
        plan = json.dumps({"modules": modules, "config": self._config._asdict()}).encode()
        async with self._turn:
            header, _ = await self._exchange(struct.pack(">I", len(plan)) + plan, seconds, "its start")
        if not header.get("ready"):
            raise SandboxLost(f"{self.name}: its server answered {header}, expected ready")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 10.0,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        if not argv:
            raise ValueError(f"argv {list(argv)!r}: expected at least one word")
        _sayable("argv", *argv)
        _sayable("cwd", cwd or "")
        for key, value in (env or {}).items():
            _sayable("env", key, value)
            if not key or "=" in key:
                raise ValueError(f"env has the name {key!r}: expected some characters, and no '=' among them")
        if not 0 < timeout < 1e6:
            raise ValueError(f"timeout {timeout}: expected seconds between 0 and 1,000,000")
        request = {"op": "run", "argv": list(argv), "env": dict(env or {}), "timeout": timeout}
        request |= {} if cwd is None else {"cwd": os.path.join(self.workdir, cwd)}
        begin, end = time.monotonic(), "failed"
        try:
            result = await self._run(request, stdin, cwd or self.workdir)
            end = _end_of(result)
            return result
        except asyncio.CancelledError:
            end = "cancelled"
            raise
        except SandboxLost:
            end = "lost"
            raise
        finally:
            self.on_program(end, time.monotonic() - begin)

    async def _run(self, request: dict[str, Any], stdin: bytes, cwd: str) -> ExecResult:
        try:
            header, body = await self._call(request, stdin, request["timeout"], repr(request["argv"][0]))
        except LostToMemory:
            return ExecResult(137, b"", b"", oom=True)
        self._raise_setup(header, cwd)
        size = header["out"]
        result = ExecResult(
            header["code"], body[:size], body[size:], header["timed_out"], header["oom"], header["truncated"]
        )
        self.tainted = self.tainted or result.timed_out or result.oom or result.truncated or not header["swept"]
        return result

    async def write_file(self, path: str, data: bytes) -> None:
        """See `Sandbox.write_file`."""
        _sayable("path", path)
        request = {"op": "write", "path": os.path.join(self.workdir, path), "timeout": FILE_SECONDS}
        header, _ = await self._call(request, bytes(data), FILE_SECONDS, f"writing {path}")
        self._raise_setup(header, path)
        self._expect_whole(header, "writing", path)

    async def read_file(self, path: str) -> bytes:
        """See `Sandbox.read_file`."""
        _sayable("path", path)
        request: dict[str, Any] = {"op": "read", "path": os.path.join(self.workdir, path), "timeout": FILE_SECONDS}
        header, body = await self._call(request | {"cap": self._config.disk}, b"", FILE_SECONDS, f"reading {path}")
        self._raise_setup(header, path)
        self._expect_whole(header, "reading", path)
        return body

    @property
    def closed(self) -> bool:
        """Whether somebody on this side removed it."""
        return self._closing is not None

    async def reset(self) -> bool:
        """Make it as new for the next user; False when that cannot be and the box must go."""
        if self.lost or self.tainted:
            return False
        header, _ = await self._call({"op": "reset"}, b"", FILE_SECONDS, "its cleaning")
        return bool(header["clean"])

    async def close(self) -> None:
        """Kill what runs and remove the box; safe to repeat, and goes on when the caller is cancelled."""
        self.lost = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._closing)

    async def _call(
        self, request: dict[str, Any], body: bytes, timeout: float, what: str
    ) -> tuple[dict[str, Any], bytes]:
        text = json.dumps(request).encode()
        frame = struct.pack(">II", len(text), len(body)) + text + body
        async with self._turn:
            header, answer = await self._exchange(frame, timeout + SLACK, what)
        if "lost" in header:
            self.lost = True
            raise SandboxLost(f"{self.name}: {header['lost']}, while it did {what}; the box is recycled")
        return header, answer

    async def _exchange(self, frame: bytes, seconds: float, what: str) -> tuple[dict[str, Any], bytes]:
        if self.lost:
            raise SandboxLost(f"{self.name} is gone; {what} was asked of it: open another box")
        whole = False
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(frame)
                await self._writer.drain()
                head, size = struct.unpack(">II", await self._reader.readexactly(8))
                header = json.loads(await self._reader.readexactly(head))
                answer = await self._reader.readexactly(size)
            whole = True
        except TimeoutError:
            # A box whose memory is used up can hold its own server up for longer than the slack.
            kind = LostToMemory if (await self._why()).oom else SandboxLost
            raise kind(f"{self.name}: no answer within {seconds:.0f} s to {what}; the box is recycled") from None
        except (EOFError, OSError) as error:
            loss = await self._why()
            kind = LostToMemory if loss.oom else SandboxLost
            raise kind(f"{self.name} ended during {what}: {loss.text or repr(error)}") from error
        finally:
            # A cancelled call leaves half an exchange in the pipe: nothing sound can follow it.
            self.lost = self.lost or not whole
        return header, answer

    def _raise_setup(self, header: dict[str, Any], path: str) -> None:
        if not header["setup"]:
            return
        number, _, text = header["setup"].partition(" ")
        if int(number):
            raise OSError(int(number), os.strerror(int(number)), path)
        self.lost = True
        raise SandboxLost(f"{self.name}: a program could not be confined: {text}; it did not run")

    def _expect_whole(self, header: dict[str, Any], doing: str, path: str) -> None:
        if header["code"] or header["timed_out"] or header["truncated"]:
            self.tainted = True
            raise OSError(f"{doing} {path} in {self.name} ended with {header}: expected the whole file")


def _sayable(what: str, *words: str) -> None:
    """ValueError for words that no program can be given: a mistake of the caller's, or a model's, and no lost box."""
    for word in words:
        try:
            unfit = not isinstance(word, str) or b"\0" in os.fsencode(word)
        except UnicodeEncodeError:  # half a character
            unfit = True
        if unfit:
            raise ValueError(f"{what} has {word!r:.200}: expected text without NUL bytes, and whole characters")


def _end_of(result: ExecResult) -> str:
    limits = (("timeout", result.timed_out), ("oom", result.oom), ("output", result.truncated))
    return next((end for end, hit in limits if hit), "failed" if result.returncode else "ok")


class Process:
    """A fork server that is a local child process; its stderr is kept for error texts."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr

    async def box(
        self,
        name: str,
        config: Config,
        stop: Callable[[], Awaitable[None]],
        seconds: float,
        oom: Callable[[], bool] = lambda: False,
    ) -> ServerBox:
        """The booted box on top of it; stopped again when it does not boot. `oom` tells of kills for memory in it."""

        async def why() -> Loss:
            return (await self.why())._replace(oom=oom())

        box = ServerBox(name, config, self._stdout, self._stdin, stop, why)
        try:
            await box.boot(seconds)
        except BaseException:
            await box.close()
            raise
        return box

    async def why(self) -> Loss:
        """What is known about its end."""
        try:
            async with asyncio.timeout(2.0):
                text = (await self._stderr.read(4000)).decode("utf-8", "replace").strip()
                return Loss(f"exit code {await self._process.wait()} {text}".strip())
        except TimeoutError:
            return Loss("its pipe closed")

    async def stop(self) -> None:
        """Close its pipe, which ends it and all it started; kill it where it takes too long."""
        self._stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            try:
                # Its process group: bubblewrap's inner process outlives the outer one.
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended while this process stood still
            await self._process.wait()
        self._process._transport.close()  # type: ignore[attr-defined]  # else its pipes wait for the collector


async def spawn(argv: Sequence[str], env: Mapping[str, str]) -> Process:
    """Start a local fork server in a session of its own. SandboxLost when it cannot be started."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(env), cwd="/", start_new_session=True
        )
    except OSError as error:
        raise SandboxLost(f"cannot start {argv[0]}: {error}") from error
    return Process(process)


def config_error(kind: str, reason: str, remedy: str) -> ConfigError:
    """The error of a kind of box that this machine cannot offer."""
    return ConfigError(f"sandbox kind {kind!r} cannot run here: {reason}; {remedy}")
