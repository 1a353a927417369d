"""The kinds of box that this machine offers to tests, and the traces that they must not leave."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandbox import SandboxOptions, open_sandbox
from agentrl.sandbox.owner import owner_label
from agentrl.sandbox.pool import Pool

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None or shutil.which("busybox") is None,
    reason="needs bubblewrap and busybox: apt-get install bubblewrap busybox-static",
)
DOCKER_IS_HERE = "DOCKER_HOST" in os.environ
needs_docker = pytest.mark.skipif(not DOCKER_IS_HERE, reason="needs an engine at DOCKER_HOST: .ci/docker.sh")
BUBBLEWRAP = pytest.param("bubblewrap", marks=needs_bwrap)
DOCKER = pytest.param("docker", marks=[pytest.mark.docker, needs_docker])
BOUNDARIES = [BUBBLEWRAP, DOCKER]
GOING_SECONDS = 20.0


def pool_of(kind: str, **settings: Any) -> Pool:
    """A pool of two slots of `kind`."""
    return open_sandbox(SandboxOptions.model_validate({"kind": kind, "slots": 2, **settings}))


def containers(label: str | None = None) -> list[str]:
    """Ids of the containers that carry our label, of this process where none is given."""
    import docker

    client = docker.from_env()
    try:
        label = f"agentrl.owner={owner_label() if label is None else label}"
        return [c.short_id for c in client.containers.list(all=True, filters={"label": label}, ignore_removed=True)]
    finally:
        client.close()


def traces(label: str | None = None) -> dict[str, list[str]]:
    """What a box of an owner (of this process) could leave: cgroups, folders, mounts, processes, containers."""
    me = label or owner_label()
    cgroups = [
        str(p) for home in ("agentrl.*", "*/agentrl.*") for p in Path("/sys/fs/cgroup").glob(home) if me in p.name
    ]
    folders = [str(p) for p in Path("/tmp").glob(f"agentrl-boxes-*/{me}-*")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "agentrl-boxes" in line]
    pid = int(me.split(".")[1])
    uids = range(1_000_000 + pid * 256, 1_000_000 + pid * 256 + 256)
    processes = [p.name for p in Path("/proc").iterdir() if p.name.isdigit() and _uid(p) in uids]
    found = {"cgroups": cgroups, "folders": folders, "mounts": mounts, "processes": processes}
    return found | ({"containers": containers(me)} if "DOCKER_HOST" in os.environ else {})


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails when a box that began within left something; a pool around it may go on.

    What is killed takes a moment to go: programs within are to last longer than `GOING_SECONDS`.
    """
    before = traces()
    yield
    until = time.monotonic() + GOING_SECONDS
    while left := {
        kind: new for kind, names in traces().items() if (new := sorted({*names} - {*before.get(kind, ())}))
    }:
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.05)


async def eventually(done: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until it is so."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"not within {seconds} s"
        await asyncio.sleep(0.05)


def long_sleep() -> list[str]:
    """A program that lasts for years, and that nothing else on this machine runs."""
    return ["sleep", str(secrets.randbelow(10**8) + 10**8)]


def running(*argv: str) -> list[Path]:
    """The processes of this machine with these very arguments; those in boxes are among them."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes() == "\0".join((*argv, "")).encode():
                found.append(folder)
        except OSError:
            continue
    return found


def _uid(folder: Path) -> int:
    try:
        return folder.stat().st_uid
    except OSError:
        return -1
