"""What this machine has, asked of the kernel: memory, disk, shared memory, GPUs. No torch."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple


class Space(NamedTuple):
    """A place for files. `problem` says why nothing can be written there; "" where it can."""

    path: Path
    free: int
    total: int
    problem: str


def gpu_count() -> int:
    """GPUs that have a device file here and that $CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    # /dev is the truth inside a container: the driver lists the host's GPUs there, too.
    nvidia = [p for p in Path("/dev").glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdecimal()]
    return len(nvidia or (list(Path("/dev/dri").glob("renderD*")) if Path("/dev/kfd").exists() else []))


def memory() -> tuple[int, int]:
    """Bytes of main memory: available now, and in all; a container's limit counts."""
    found: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    available, total = found["MemAvailable"], found["MemTotal"]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _number(Path(limit)), _number(Path(used))
        if most is not None and now is not None and most < total:
            total, available = most, min(available, max(0, most - now))
    return available, total


def space(wanted: Path) -> Space:
    """The room at `wanted`, or where it would be made; tried by writing a file there."""
    folder = wanted.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return Space(wanted, 0, 0, f"{folder} is a file, not a folder")
    usage = shutil.disk_usage(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"agentrl")
    except OSError as error:
        return Space(wanted, usage.free, usage.total, f"nothing can be written in {folder}: {error.strerror or error}")
    return Space(wanted, usage.free, usage.total, "")


def open_files() -> int:
    """How many files and sockets one process may hold open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def size(n_bytes: float) -> str:
    """Bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {unit}" if n_bytes < 100 * scale else f"{n_bytes / scale:.0f} {unit}"
    return f"{n_bytes / 1e3:.0f} kB"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
