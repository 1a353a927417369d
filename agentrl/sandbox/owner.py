"""Who owns a box, and whether it still lives: the label by which the next start finds what a dead run left.

The label is `pidns.pid.starttime`: a process id alone is reused, and an id of another pid namespace says nothing here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path

from agentrl.errors import SandboxLost


def owner_label(pid: int | None = None) -> str:
    """The label of this process (or of `pid`). ProcessLookupError when there is none."""
    pid = os.getpid() if pid is None else pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(pid)
    return f"{os.stat('/proc/self/ns/pid').st_ino}.{pid}.{int(fields[19])}"


def is_dead(label: str) -> bool:
    """Whether the owner surely lives no more; an owner of another pid namespace counts as alive."""
    parts = label.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return False
    if int(parts[0]) != os.stat("/proc/self/ns/pid").st_ino:
        return False
    try:
        return owner_label(int(parts[1])) != label
    except ProcessLookupError:
        return True


def _home() -> Path:
    return Path(tempfile.gettempdir()) / f"agentrl-boxes-{os.getuid()}"


def private_folder() -> Path:
    """A new folder for one pool's boxes, marked with its owner. SandboxLost when it cannot be made (disk full, …)."""
    home = _home()
    folder = home / f"{owner_label()}-{uuid.uuid4().hex[:8]}"
    try:
        _made(folder)
        home.chmod(0o700)
        if home.is_symlink() or home.stat().st_uid != os.getuid():
            raise SandboxLost(f"{home} belongs to somebody else; remove it, or set TMPDIR")
    except OSError as error:
        raise SandboxLost(f"cannot make a folder for boxes under {home}: {error}") from error
    return folder


def _made(folder: Path, tries: int = 100) -> None:
    # Whoever discards the last folder in the home removes that too, at any moment.
    for left in reversed(range(tries)):
        try:
            return folder.mkdir(mode=0o700, parents=True)
        except FileNotFoundError:
            if not left:
                raise


def discard_folder(folder: Path) -> None:
    """Remove a private folder, and the home of all of them with the last one."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        pass  # others are in it


def reap_folders() -> list[str]:
    """Remove the folders of dead owners; their names."""
    reaped = []
    for folder in _home().glob("*-*"):
        if is_dead(folder.name.rpartition("-")[0]):
            discard_folder(folder)
            reaped.append(folder.name)
    return reaped
