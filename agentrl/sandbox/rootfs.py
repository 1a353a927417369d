"""A root file system for boxes, made of the running Python: nothing to download, nothing of the host in it but that.

It holds the interpreter with its standard library, the shared libraries that they load (`ldd`), busybox for the shell
and its tools, and the distributions that were asked for. It is built once per content and kept in the user's cache:
the same folder serves bubblewrap as the root and Docker as an image.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from agentrl.errors import ConfigError, SandboxLost

LEFT_OUT = shutil.ignore_patterns(
    "site-packages", "test", "tests", "idlelib", "turtledemo", "tkinter", "ensurepip", "lib2to3", "*.a", "config-3*"
)
FOLDERS = (
    "bin",
    "etc",
    "tmp",
    "work",
    "proc",
    "sys",
    "dev",
    "usr/bin",
    "usr/local/bin",
    "var/tmp",
    "root",
    "run",
    "lib64",
)
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def build_rootfs(packages: Sequence[str] = (), *, cache: Path | None = None) -> Path:
    """The folder of the root file system, built where it is not there yet (2–12 s).

    Raises ConfigError when busybox is missing or a package is not installed, with the remedy; SandboxLost when it
    cannot be written.
    """
    busybox = _busybox()
    chosen = _with_requirements(packages)
    key = _key(busybox, chosen)
    home = (cache or _cache()) / "rootfs"
    folder, complete = home / key, home / f"{key}.complete"
    if complete.exists():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may want it at once; released when the file closes
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _fill(folder, busybox, chosen)
                complete.touch()
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise SandboxLost(
                    f"cannot build a root file system in {home}: {error}; it takes 60 MB or more"
                ) from error
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"


def _busybox() -> Path:
    found = shutil.which("busybox")
    if found is None:
        raise ConfigError(
            "a root file system needs busybox, and there is none on PATH: apt-get install busybox-static, "
            "or give a root file system (sandbox.rootfs) or an image (sandbox.image) of your own"
        )
    return Path(found).resolve()


def _with_requirements(packages: Sequence[str]) -> list[Distribution]:
    chosen: dict[str, Distribution] = {}
    todo = list(packages)
    while todo:
        name = re.split(r"[ ;<>=!~\[(]", todo.pop(), maxsplit=1)[0]
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in chosen:
            continue
        try:
            chosen[key] = distribution(name)
        except PackageNotFoundError:
            if name in packages:
                raise ConfigError(
                    f"sandbox.packages names {name!r}, which is not installed: pip install {name}"
                ) from None
            continue  # a requirement for another platform or Python
        todo += [text for text in chosen[key].requires or () if "extra ==" not in text]
    return [chosen[key] for key in sorted(chosen)]


def _key(busybox: Path, chosen: Iterable[Distribution]) -> str:
    parts = [sys.version, sys.base_prefix, str(Path(sys.executable).resolve()), Path(__file__).read_text()]
    parts += [f"{busybox} {busybox.stat().st_size}", *(f"{d.name}=={d.version}" for d in chosen)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _fill(root: Path, busybox: Path, chosen: Iterable[Distribution]) -> None:
    for name in FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in ETC.items():
        (root / "etc" / name).write_text(text)
    shutil.copy2(busybox, root / "bin" / "busybox")
    for applet in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if not (root / "bin" / applet).exists():
            (root / "bin" / applet).symlink_to("busybox")
    binary = Path(sys.executable).resolve()
    stdlib = Path(os.__file__).resolve().parent
    _copy(binary, root)
    shutil.copytree(stdlib, _inside(root, stdlib), ignore=LEFT_OUT, symlinks=True, dirs_exist_ok=True)
    site = _inside(root, stdlib / "site-packages")
    site.mkdir(exist_ok=True)
    for one in chosen:
        _copy_distribution(one, site)
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        (root / "usr/bin" / name).symlink_to(binary)
    loaded = [binary, *_inside(root, stdlib).rglob("*.so"), *_inside(root, stdlib).rglob("*.so.*"), busybox]
    for library in _libraries(loaded):
        if not library.is_relative_to(root):  # what a wheel brought is there already
            _copy(library, root)
    _open_to_all(root)


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _copy(path: Path, root: Path) -> None:
    _inside(root, path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, _inside(root, path))  # follows links: a library is where its loader looks for it


def _copy_distribution(one: Distribution, site: Path) -> None:
    for entry in one.files or ():
        source = Path(str(one.locate_file(entry)))
        if ".." in entry.parts or "__pycache__" in entry.parts or not source.is_file():
            continue  # scripts and data outside of site-packages
        target = site / entry
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _libraries(binaries: Iterable[Path]) -> set[Path]:
    names = [str(path) for path in binaries]
    listed = subprocess.run(["ldd", *names], capture_output=True, text=True, check=False).stdout
    found = {
        Path(os.path.normpath(path)) for path in re.findall(r"(?:=>\s*|^\s+)(/\S+)\s+\(0x", listed, flags=re.MULTILINE)
    }
    return {path for path in found if path.exists()}


def _open_to_all(root: Path) -> None:
    # Programs run as another user: every folder on the way (a home of mode 700, say) must let them in.
    for folder, _, names in os.walk(root):
        os.chmod(folder, 0o755)
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
