"""A cgroup a box, version 1 or 2, where this process may make one: memory, processes and CPU of the whole box."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.owner import is_dead, owner_label

ROOT = Path("/sys/fs/cgroup")
V1 = ("memory", "pids", "cpu")
LEAF = "agentrl-members"
PERIOD = 100_000


class Cgroup:
    """The limits of one box. `procs` are the files into which its first process writes its id."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    @property
    def procs(self) -> list[Path]:
        """Where a process joins."""
        return [folder / "cgroup.procs" for folder in self._folders]

    @property
    def memory(self) -> Path:
        """The folder with the counter of kills for memory."""
        return self._folders[0]

    @property
    def inside(self) -> str:
        """Where the box shows that folder (as Docker does)."""
        return "/sys/fs/cgroup/memory" if (self.memory / "memory.oom_control").exists() else "/sys/fs/cgroup"

    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed for memory; none are known once it is removed."""
        for name in ("memory.events", "memory.oom_control"):
            try:
                lines = (self.memory / name).read_text().splitlines()
            except OSError:  # of the other version of cgroups, or removed by who closes the box
                continue
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        return 0

    def remove(self, seconds: float = 30.0) -> bool:
        """Kill what is in it and remove it; False when something would not go in time."""
        until = time.monotonic() + seconds
        while True:
            for folder in self._folders:
                _kill_members(folder)
            if all(_rmdir(folder) for folder in self._folders):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.01)


def make_cgroup(name: str, options: SandboxOptions) -> Cgroup | None:
    """A cgroup with the limits of `options`, labelled with this process; None where that is not possible here."""
    label = f"agentrl.{owner_label()}.{name}"
    folders = _homes()
    made = Cgroup([home / label for home in folders])
    # The three writable folders of a box are memory too.
    memory = str((options.memory_mb + options.disk_mb) << 20)
    quota = int(options.cpu * PERIOD)
    limits = {"memory": ("memory.limit_in_bytes", memory), "pids": ("pids.max", str(options.pids + 1))}
    limits["cpu"] = ("cpu.cfs_quota_us", str(quota))
    try:
        for folder in made._folders:
            folder.mkdir()
            if len(folders) == 1:
                (folder / "memory.max").write_text(memory)
                (folder / "memory.oom.group").write_text("0")
                (folder / "pids.max").write_text(str(options.pids + 1))
                (folder / "cpu.max").write_text(f"{quota} {PERIOD}")
                _swap(folder / "memory.swap.max", "0")
            else:
                file, value = limits[folder.parent.name]
                (folder / file).write_text(value)
                _swap(folder / "memory.memsw.limit_in_bytes", memory)
    except OSError:
        made.remove(0.5)
        return None
    return made if folders else None


def reap_cgroups() -> list[str]:
    """Kill and remove the cgroups of dead owners; their names."""
    reaped = []
    for home in _homes():
        for folder in home.glob("agentrl.*"):
            if is_dead(".".join(folder.name.split(".")[1:4])):
                Cgroup([folder]).remove()
                reaped.append(folder.name)
    return reaped


def _homes() -> list[Path]:
    if all((ROOT / name / "cgroup.procs").exists() for name in V1):
        return [ROOT / name for name in V1] if os.access(ROOT / "memory", os.W_OK) else []
    try:
        path = Path("/proc/self/cgroup").read_text().strip().rpartition("::/")[2]
        own = (ROOT / path).parent if Path(path).name == LEAF else ROOT / path
        for home in (own, ROOT):
            if os.access(home, os.W_OK) and (_divides(home) or (home == own and _divide(home))):
                return [home]
    except OSError:
        pass
    return []


def _divides(home: Path) -> bool:
    return set(V1) <= set((home / "cgroup.subtree_control").read_text().split())


def _divide(home: Path) -> bool:
    """Let a delegated cgroup be divided. One with members cannot be, so that they move into a leaf of it: only where
    they are this process and those that it started (`systemd-run --user --scope -p Delegate=yes agentrl …`)."""
    members = (home / "cgroup.procs").read_text().split()
    if not set(V1) <= set((home / "cgroup.controllers").read_text().split()) or not _family(members):
        return False
    leaf = home / LEAF
    leaf.mkdir(exist_ok=True)
    for pid in members:
        (leaf / "cgroup.procs").write_text(pid)
    (home / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in V1))
    return True


def _family(members: list[str]) -> bool:
    """Whether all are this process or descend from it."""
    for member in members:
        pid = int(member)
        while pid > 1 and pid != os.getpid():
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[1])
        if pid != os.getpid():
            return False
    return True


def _swap(file: Path, value: str) -> None:
    if file.exists():  # a kernel without swap accounting has no such file, and needs none where there is no swap
        file.write_text(value)


def _kill_members(folder: Path) -> None:
    try:
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), 9)
    except (FileNotFoundError, ProcessLookupError):
        pass
    except OSError as error:
        if error.errno != errno.ENODEV:  # somebody else removed it after it was opened
            raise


def _rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
