"""The contract of `Sandbox` as a test that any kind of box must pass; for whoever writes a new kind."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable

from agentrl.errors import ContractError
from agentrl.sandbox.types import Sandbox, SandboxPool

EVERY_BYTE = bytes(range(256)) * 300
TIMEOUTS = (0.5, 5.0, 20.0)
"""Of a program that writes and then sleeps: the later ones where the machine did not let it write in the first."""


async def check_sandbox(pool: SandboxPool) -> None:
    """Try every promise of the contract on a box of `pool`; ContractError lists each one that was broken.

    Example:
        async with open_sandbox(SandboxOptions(kind="my.module:Boxes")) as pool:
            await check_sandbox(pool)
    """
    checks: list[Callable[[Sandbox], Awaitable[None]]] = [
        _streams_and_codes,
        _environment,
        _limits,
        _files,
        _leftovers,
    ]
    broken = []
    for check in checks:
        async with pool.box() as box:
            try:
                await check(box)
            except AssertionError as error:
                broken.append(f"{check.__name__.strip('_')}: {error}")
    async with pool.box() as box:
        await box.write_file("left.txt", b"secret")
    async with pool.box() as box:
        listed = (await box.exec(["sh", "-c", "ls -A . /tmp"])).stdout
        if b"left.txt" in listed:
            broken.append(f"clean boxes: the next user sees {listed!r}")
    if broken:
        raise ContractError("the sandbox breaks its contract:\n" + "\n".join(broken))


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: found {_short(found)}, expected {_short(expected)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:140]} … {text[-140:]}"


async def _streams_and_codes(box: Sandbox) -> None:
    done = await box.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    _expect(
        (done.returncode, done.stdout, done.stderr, done.ok), (3, b"out\n", b"err\n", False), "streams and exit code"
    )
    done = await box.exec(["cat"], stdin=EVERY_BYTE)
    _expect(done.stdout, EVERY_BYTE, "every byte through stdin and stdout")
    done = await box.exec(["true"])
    _expect((done.returncode, done.stdout, done.stderr), (0, b"", b""), "silence is b'', not None")
    _expect((await box.exec(["no-such-program"])).returncode, 127, "exit code of a program that is not there")
    done = await box.exec(["sh", "-c", "kill -TERM $$"])
    _expect(done.returncode, 143, "exit code of a program that a signal ended")
    done = await box.exec(["sh", "-c", "printf '%s|' \"$@\"", "sh", "a b", "$HOME", ""])
    _expect(done.stdout, b"a b|$HOME||", "arguments reach the program as they are")
    for argv in (["python3", "-c", "import sys; print(input(), sys.argv)", "x"],):
        _expect((await box.exec(argv, stdin=b"in")).stdout, b"in ['-c', 'x']\n", "a Python program")


async def _environment(box: Sandbox) -> None:
    done = await box.exec(["sh", "-c", "pwd; echo $FOO; echo $TZ"], env={"FOO": "b=r"})
    _expect(done.stdout.splitlines()[1:], [b"b=r", b"UTC"], "environment")
    _expect(done.stdout.splitlines()[0].decode(), box.workdir, "working directory")
    await box.exec(["mkdir", "sub"])
    _expect((await box.exec(["pwd"], cwd="sub")).stdout.decode().strip(), f"{box.workdir}/sub", "cwd")
    hashes = {(await box.exec(["python3", "-c", "print(hash('a'))"])).stdout for _ in range(2)}
    _expect(len(hashes), 1, "different hash seeds")


async def _limits(box: Sandbox) -> None:
    for timeout in TIMEOUTS:
        started = time.monotonic()
        done = await box.exec(["sh", "-c", "echo part; sleep 600"], timeout=timeout)
        _expect(
            time.monotonic() - started < timeout + 30, True, f"a time-out of {timeout} s returns 30 s later at most"
        )
        if done.stdout:
            break
    _expect((done.timed_out, done.stdout, done.ok), (True, b"part\n", False), "time-out with its partial output")
    _expect((await box.exec(["echo", "ok"])).stdout, b"ok\n", "a program after one that timed out")
    done = await box.exec(["yes"], timeout=30)
    _expect((done.truncated, done.timed_out), (True, False), "a flood of output")
    _expect(len(done.stdout) > 0, True, "a flood keeps its start")


async def _files(box: Sandbox) -> None:
    await box.write_file("deep/er/data.bin", EVERY_BYTE)
    _expect(await box.read_file("deep/er/data.bin"), EVERY_BYTE, "every byte through a file")
    _expect(await box.read_file(f"{box.workdir}/deep/er/data.bin"), EVERY_BYTE, "the same by its absolute path")
    await box.exec(["sh", "-c", "echo new > out.txt; ln -s /etc/passwd link"])
    _expect(await box.read_file("out.txt"), b"new\n", "a file that a program wrote")
    for path in ("missing.txt", "deep", "link"):
        try:
            found = await box.read_file(path)
        except OSError:
            continue
        raise AssertionError(f"reading {path} gave {_short(found)}, expected an OSError")


async def _leftovers(box: Sandbox) -> None:
    # A number that no other program on this machine sleeps for: a box that is no boundary sees them all.
    seconds = secrets.randbelow(10**8) + 10**8
    script = f"(sleep {seconds} &) ; (setsid sleep {seconds} >/dev/null 2>&1 &) ; echo started"
    done = await box.exec(["sh", "-c", script], timeout=60)
    _expect(
        (done.stdout, done.timed_out), (b"started\n", False), "a program that leaves others behind, holding its pipes"
    )
    script = f"cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 's[l]eep {seconds}'"
    counted = await box.exec(["sh", "-c", script], timeout=60)
    _expect(counted.stdout.strip(), b"0", "processes that outlive their program")
