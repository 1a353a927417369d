"""What hostile programs try, each with the sign of a breach. Only for real boundaries: some would harm this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from agentrl.sandbox import ExecResult, Sandbox

MEMORY_MB, DISK_MB, PIDS, INODES, OUTPUT, CPU = 128, 16, 32, 2048, 1 << 16, 0.5
"""The limits that the attacks try to get past."""
SECRET = "host-secret-7c1f"


class World(NamedTuple):
    """What the host holds that no program may reach."""

    port: int
    abstract: str
    socket_path: str
    file_0600: Path
    file_0644: Path
    folder: Path
    reached: list[str]
    """Which of its sockets somebody connected to."""


Judge = Callable[[Sandbox, ExecResult, World], Awaitable[str]]


class Attack(NamedTuple):
    """A Python program. It prints BREACH where it got through, or `judge` says what is wrong ("" for nothing)."""

    name: str
    program: str
    timeout: float = 20.0
    judge: Judge | None = None


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """Listening sockets and secret files on the host."""
    reached: list[str] = []
    path = folder / "open.sock"
    abstract = f"agentrl-attack-{os.getpid()}"
    servers = {"tcp": socket.create_server(("127.0.0.1", 0))}
    for name, address in (("abstract", f"\0{abstract}"), ("path", str(path))):
        servers[name] = socket.socket(socket.AF_UNIX)
        servers[name].bind(address)
        servers[name].listen(16)
    path.chmod(0o777)

    def accept(name: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                servers[name].accept()[0].close()
                reached.append(name)

    threads = [threading.Thread(target=accept, args=(name,), daemon=True) for name in servers]
    for thread in threads:
        thread.start()
    private, public = folder / "private.txt", folder / "public.txt"
    for file, mode in ((private, 0o600), (public, 0o644)):
        file.write_text(SECRET)
        file.chmod(mode)
    os.environ["AGENTRL_TEST_SECRET"] = SECRET
    try:
        yield World(servers["tcp"].getsockname()[1], abstract, str(path), private, public, folder, reached)
    finally:
        del os.environ["AGENTRL_TEST_SECRET"]
        for server in servers.values():
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        for thread in threads:
            thread.join(60.0)


async def others(box: Sandbox) -> str:
    """The processes of programs in the box."""
    script = """
import os
for p in os.listdir('/proc'):
    try:
        if p.isdigit() and int(p) not in (1, os.getpid(), os.getppid()):
            print(p, repr(open(f'/proc/{p}/cmdline').read()))
    except OSError: pass
"""
    return (await box.exec(["python3", "-c", script])).stdout_text


async def nothing_left(box: Sandbox, result: ExecResult, world: World) -> str:
    """No process of the program lives on."""
    return await others(box)


async def returned_in_time(box: Sandbox, result: ExecResult, world: World) -> str:
    """Ended by the clock, and nothing lives on."""
    return "" if result.timed_out and not await others(box) else f"{result} left {await others(box)}"


async def capped(box: Sandbox, result: ExecResult, world: World) -> str:
    """Never more than the cap."""
    return "" if result.truncated and len(result.stdout) <= OUTPUT else f"{len(result.stdout)} bytes"


async def works_after(box: Sandbox, result: ExecResult, world: World) -> str:
    """The box still runs programs."""
    done = await box.exec(["echo", "ok"])
    return "" if done.stdout == b"ok\n" else f"then: {done}"


async def not_reached(box: Sandbox, result: ExecResult, world: World) -> str:
    """Nobody connected to the host."""
    return f"reached {world.reached}" if world.reached else ""


async def links_refused(box: Sandbox, result: ExecResult, world: World) -> str:
    """A result file that is a link, or lies behind one, gives nothing of the host."""
    for path in ("result.txt", "folder/private.txt", "folder/public.txt"):
        try:
            return f"{path} gave {(await box.read_file(path))!r}"
        except OSError:
            continue
    return ""


FILL = """
import os
total = 0
try:
    for i in range({count}):
        with open(f'{path}/{{i}}', 'wb') as f:
            for _ in range({mb}):
                total += f.write(bytes(1 << 20))
except OSError as e:
    print(e)
print('BREACH' if total > {limit} << 20 else 'stopped', total)
"""


def fill(path: str, count: int, mb: int) -> str:
    """Writes count files of mb MiB; a breach is twice the disk limit."""
    return FILL.format(path=path, count=count, mb=mb, limit=2 * DISK_MB)


def hold(mb: int, processes: int) -> str:
    """So many processes hold so much memory each, at once; a breach is three times the memory limit."""
    return f"""
import os, time
read, write = os.pipe()
started = []
for _ in range({processes}):
    try:
        started.append(os.fork())
    except OSError:
        break
    if started[-1] == 0:
        block = bytearray(os.urandom(1 << 20) * {mb})
        os.write(write, b'%08d' % os.getpid())
        time.sleep(600)
        os._exit(0)
os.close(write)
time.sleep(2)
os.set_blocking(read, False)
try: told = os.read(read, 8 * {processes})
except BlockingIOError: told = b''
ready = {{int(told[at:at + 8]) for at in range(0, len(told), 8)}}
held = sum(pid in ready and os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in started) * {mb}
print('BREACH' if held > {3 * MEMORY_MB} else 'stopped', held)
"""


def attacks(world: World) -> list[Attack]:
    """All of them."""
    bomb = f"""
import os, time
n = 0
try:
    while n < {8 * PIDS}:
        if os.fork() == 0: time.sleep(600); os._exit(0)
        n += 1
except OSError as e: print(e)
print('BREACH' if n > {2 * PIDS} else 'stopped', n)
"""
    memfd = f"""
import os
total = 0
try:
    while total < {4 * MEMORY_MB}:
        f = os.memfd_create('x'); total += os.write(f, os.urandom(1 << 20) * 8) >> 20
except OSError as e: print(e)
print('BREACH' if total > {3 * MEMORY_MB} else 'stopped', total)
"""
    inodes = f"""
n = 0
try:
    while n < {8 * INODES}: open(f'f{{n}}', 'w').close(); n += 1
except OSError as e: print(e)
print('BREACH' if n > {2 * INODES} else 'stopped', n)
"""
    connect = (
        "import socket\ns = socket.socket(socket.{family})\ns.settimeout(3)\ns.connect({address!r})\nprint('BREACH')"
    )
    read = "import sys\nprint(open({path!r}).read())"
    environ = """
import glob, os
print(dict(os.environ))
for p in glob.glob('/proc/[0-9]*/environ'):
    try: print(open(p).read())
    except OSError: pass
"""
    outside = f"""
import os
for folder in ('/', '/usr/bin', '/etc', '/bin', '/root', '/proc/sys/kernel', '/sys', '/var', {str(world.folder)!r}):
    try:
        open(folder + '/agentrl-was-here', 'w').write('x')
        print('BREACH', folder)
    except OSError: pass
for file in ('/etc/passwd', '/usr/bin/python3', '/proc/sys/kernel/hostname', '/proc/sysrq-trigger'):
    try:
        open(file, 'a').close()
        print('BREACH', file)
    except OSError: pass
"""
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(600)
    os._exit(0)
os.wait()
"""
    namespace = """
import ctypes
libc = ctypes.CDLL(None)
for flags in (0x10000000, 0x10020000):
    if libc.unshare(flags) == 0: print('BREACH unshare')
pid = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0: libc._exit(0)
if pid > 0: print('BREACH clone')
"""
    cpu = f"""
import os, time
start = time.monotonic()
for _ in range(4):
    if os.fork() == 0:
        while time.monotonic() - start < 2: pass
        os._exit(0)
for _ in range(4): os.wait()
t = os.times(); used = (t.children_user + t.children_system) / (time.monotonic() - start)
print('BREACH' if used > {CPU * 1.5} else 'stopped', used)
"""
    family = {"tcp": "AF_INET", "abstract": "AF_UNIX", "path": "AF_UNIX"}
    address = {"tcp": ("127.0.0.1", world.port), "abstract": f"\0{world.abstract}", "path": world.socket_path}
    return [
        Attack("fork bomb, counted", bomb, judge=works_after),
        Attack("fork bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", 2.0, works_after),
        Attack("memory in one process", f"b = [bytearray(1 << 24) for _ in range({MEMORY_MB})]\nprint('BREACH')"),
        Attack("memory in many processes", hold(24, 24)),
        Attack("memory in memfd", memfd),
        Attack("disk in one file", fill(".", 1, 8 * DISK_MB)),
        Attack("disk in many files", fill(".", 8 * DISK_MB, 1)),
        Attack("inodes", inodes),
        Attack("disk in /dev/shm", fill("/dev/shm", 8 * DISK_MB, 1)),
        Attack("disk in /tmp", fill("/tmp", 8 * DISK_MB, 1)),
        *(
            Attack(f"{n} socket", connect.format(family=family[n], address=address[n]), judge=not_reached)
            for n in family
        ),
        Attack("host file 0600", read.format(path=str(world.file_0600))),
        Attack("host file 0644", read.format(path=str(world.file_0644))),
        Attack("parent's environment", environ),
        Attack("kill the caller", f"import os\nos.kill({os.getpid()}, 0)\nprint('BREACH')"),
        Attack("kill the server", "import os\nos.kill(os.getppid(), 9)", judge=works_after),
        Attack("kill everything", "import os\nif os.getpid() < 30000: os.kill(-1, 9)", judge=works_after),
        Attack("write outside", outside),
        Attack("output flood", "import os\nwhile True: os.write(1, bytes(1 << 16))", judge=capped),
        Attack(
            "ignore TERM",
            "import signal\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
            1.0,
            returned_in_time,
        ),
        Attack("double-fork daemon", daemon, judge=nothing_left),
        Attack("hold stdout", "import os, time\nif os.fork() == 0: time.sleep(600)", 10.0, nothing_left),
        Attack("zombies", "import os\nfor _ in range(20):\n    if os.fork() == 0: os._exit(0)", judge=nothing_left),
        Attack(
            "links in results",
            f"import os\nos.symlink({str(world.file_0644)!r}, 'result.txt')\n"
            f"os.symlink({str(world.folder)!r}, 'folder')",
            judge=links_refused,
        ),
        Attack("new user namespace", namespace),
        Attack("CPU share", cpu),
        Attack(
            "trace the server",
            "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print('BREACH')",
        ),
        Attack(
            "write the server's memory", "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b').read(1)\nprint('BREACH')"
        ),
    ]


async def breach(attack: Attack, box: Sandbox, host: World) -> str:
    """What got through, or ""."""
    started = time.monotonic()
    result = await box.exec(["python3", "-c", attack.program], timeout=attack.timeout)
    if b"BREACH" in result.stdout or SECRET in result.stdout_text:
        return result.stdout_text[-300:]
    if time.monotonic() - started > attack.timeout + 60:
        return f"held its caller for {time.monotonic() - started:.0f} s"
    return await attack.judge(box, result, host) if attack.judge else ""
