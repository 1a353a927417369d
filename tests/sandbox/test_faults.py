"""Faults of the machine: each is an infrastructure fault with a name, and the work goes on after it."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.sandbox import SandboxLost, SandboxOptions, cgroup, open_sandbox
from agentrl.sandbox.cgroup import ROOT, V1, make_cgroup, reap_cgroups
from agentrl.sandbox.owner import is_dead, owner_label, private_folder, reap_folders
from agentrl.sandbox.pool import Pool
from agentrl.sandbox.rootfs import build_rootfs
from tests.sandbox.kinds import (
    BOUNDARIES,
    DOCKER,
    containers,
    eventually,
    long_sleep,
    needs_docker,
    nothing_left,
    pool_of,
    running,
    traces,
)

TOP = Path(__file__).parent.parent.parent
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.mark.parametrize("kind", ["subprocess", *BOUNDARIES])
async def test_a_killed_owner_leaves_nothing(kind: str) -> None:
    owner = _owner(kind)
    program = ["sleep", f"4{owner.pid}"]
    try:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == "running\n"
        label = owner_label(owner.pid)
        assert not is_dead(label)
        await eventually(lambda: bool(running(*program)))  # on a slow machine the box takes its time
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()  # type: ignore[union-attr]
    assert is_dead(label)
    await eventually(lambda: not running(*program))
    if kind == "subprocess":
        reap_folders()
    else:
        async with pool_of(kind) as pool, pool.box() as box:
            assert (await box.exec(["true"])).ok
    # Whoever else on this machine starts a box removes them too, and may be about to.
    await eventually(lambda: not [what for what, names in traces(label).items() if names and what != "processes"])


def _owner(kind: str) -> subprocess.Popen[str]:
    program = str(Path(__file__).with_name("owner_program.py"))
    return subprocess.Popen([sys.executable, program, kind], stdout=subprocess.PIPE, text=True)


def test_labels_tell_the_living_from_the_dead() -> None:
    mine = owner_label()
    assert not is_dead(mine)
    space, pid, start = mine.split(".")
    assert is_dead(f"{space}.{pid}.{int(start) - 1}")  # the id was used again
    assert is_dead(f"{space}.4194303.1")
    assert not is_dead(f"1.{pid}.1")  # of another pid namespace: nothing is known
    assert not is_dead("nonsense")


def test_only_folders_of_the_dead_are_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others on this machine reap too, at any moment
    mine = private_folder()
    dead = mine.with_name(f"{owner_label().rsplit('.', 1)[0]}.1-abc")
    dead.mkdir()
    reaped = reap_folders()
    assert dead.name in reaped
    assert mine.name not in reaped
    assert mine.exists()
    assert not dead.exists()
    mine.rmdir()


@pytest.fixture
def own_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cgroups are made below one that nobody else looks into: others on this machine reap too, at any moment."""
    name, divided = f"test.{uuid.uuid4().hex}", [ROOT / kind for kind in V1]
    whole = not all(map(Path.exists, divided))
    folders = [(ROOT if whole else place) / name for place in ([ROOT] if whole else divided)]
    try:
        for folder in folders:
            folder.mkdir()
        if whole:
            (folders[0] / "cgroup.subtree_control").write_text(" ".join(f"+{kind}" for kind in V1))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    if not whole:
        for kind, folder in zip(V1, folders, strict=True):
            (tmp_path / kind).symlink_to(folder)
    monkeypatch.setattr(cgroup, "ROOT", folders[0] if whole else tmp_path)
    yield
    for folder in folders:
        folder.rmdir()


@needs_root
def test_only_cgroups_of_the_dead_are_reaped(own_cgroups: None) -> None:
    mine = make_cgroup("reaping", SandboxOptions(kind="bubblewrap"))
    if mine is None:
        pytest.skip("no cgroup can be made here")
    dead = mine.memory.with_name(f"agentrl.{owner_label().rsplit('.', 1)[0]}.1.gone")
    dead.mkdir()
    sleeper = subprocess.Popen(["sleep", "60"])
    (dead / "cgroup.procs").write_text(str(sleeper.pid))
    reaped = reap_cgroups()
    assert dead.name in reaped
    assert mine.memory.name not in reaped
    assert not dead.exists()
    assert sleeper.wait(60) == -signal.SIGKILL
    assert mine.remove()


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_a_full_disk_in_the_box_is_the_programs_own(kind: str) -> None:
    async with pool_of(kind, disk_mb=2) as pool, pool.box() as box:
        with pytest.raises(OSError, match=r"No space|too large") as caught:
            await box.write_file("big", bytes(3 << 20))
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
        done = await box.exec(["sh", "-c", "head -c 3000000 /dev/zero > big2; echo rc $?"])
        assert done.stdout == b"rc 1\n"
        assert (await box.exec(["true"])).ok


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_who_gives_up_while_a_box_starts_leaves_nothing(kind: str) -> None:
    async def use(pool: Pool) -> None:
        async with pool.box():
            raise AssertionError("the box was to be still on its way")

    with nothing_left():
        async with pool_of(kind, slots=1) as pool:
            for steps in range(4):
                user = asyncio.create_task(use(pool))
                for _ in range(steps):
                    await asyncio.sleep(0)
                user.cancel()
                await asyncio.wait([user])
                assert user.cancelled()
            async with pool.box() as box:
                assert (await box.exec(["true"])).ok


@needs_root
def test_a_full_disk_of_the_host_is_an_infrastructure_fault(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        with pytest.raises(SandboxLost, match="No space left"):
            build_rootfs(cache=small)
        assert not list((small / "rootfs").glob("*/*"))
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("kind", [DOCKER])
async def test_a_container_removed_from_outside(kind: str) -> None:
    import docker

    client = docker.from_env()
    with nothing_left():
        async with pool_of(kind) as pool:
            async with pool.box() as box:
                program = long_sleep()
                ended = asyncio.create_task(box.exec(program, timeout=600))
                await eventually(lambda: bool(running(*program)))
                client.containers.get(containers()[0]).remove(force=True)
                with pytest.raises(SandboxLost, match="ended during 'sleep'"):
                    await ended
            async with pool.box() as box:
                assert (await box.exec(["echo", "ok"])).ok
    client.close()


@contextmanager
def an_engine(home: Path) -> Iterator[Callable[[], str]]:
    """A function that starts (again) an engine of our own in `home` and gives its address; stopped at the end."""
    script = str(TOP / ".ci" / "docker.sh")

    def start() -> str:
        done = subprocess.run(
            ["bash", script, "start", str(home)], check=True, capture_output=True, text=True, timeout=300
        )
        return done.stdout.strip()

    try:
        yield start
    finally:
        subprocess.run(["bash", script, "stop", str(home)], check=True, timeout=300)
    assert not home.exists()
    assert str(home) not in Path("/proc/mounts").read_text()


@needs_docker
@pytest.mark.docker
@pytest.mark.timeout(900)
# The SDK's transport leaves a socket to the collector when an engine refuses the connection.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_killed_engine(tmp_path: Path) -> None:
    home = tmp_path / "d"
    with an_engine(home) as start:
        url = start()
        async with open_sandbox(SandboxOptions(kind="docker", slots=1, docker_url=url)) as pool:
            async with pool.box() as box:
                program = long_sleep()
                ended = asyncio.create_task(box.exec(program, timeout=600))
                await eventually(lambda: bool(running(*program)))
                os.kill(int((home / "pid").read_text()), signal.SIGKILL)
                with pytest.raises(SandboxLost, match="ended during 'sleep'"):
                    await ended
            with pytest.raises(SandboxLost, match="is the engine up"):
                async with pool.box():
                    pass
            start()
            async with pool.box() as box:
                assert (await box.exec(["echo", "back"])).stdout == b"back\n"
    gc.collect()  # that socket, while the warning is ignored


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_a_program_that_gets_the_server_killed_for_memory_is_to_blame(kind: str) -> None:
    # Many small processes that give up their place as the kernel's first choice: the server may be the biggest.
    program = """
import os, time
while True:
    try:
        if os.fork() == 0:
            open('/proc/self/oom_score_adj', 'w').write('0')
            block = bytearray(os.urandom(1 << 20) * 6); time.sleep(600); os._exit(0)
    except OSError: time.sleep(0.1)
"""
    async with pool_of(kind, memory_mb=64, disk_mb=1, pids=60) as pool:
        async with pool.box() as box:
            done = await box.exec(["python3", "-c", program], timeout=60)
            assert done.oom, done
        async with pool.box() as box:
            assert (await box.exec(["true"])).ok
