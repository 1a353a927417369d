"""Boxes of bubblewrap: a private root, no network, namespaces of its own, sized memory file systems, a user id a box.

Programs see the root file system built from this Python (`agentrl.sandbox.rootfs`) and nothing of the host. With
cgroups (root, or a delegated cgroup) memory, processes and CPU of the whole box are limited; without, each process is.
The fork server is the box's first process: when the pipe to it closes, the kernel ends everything in the box.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.sandbox.cgroup import Cgroup, make_cgroup, reap_cgroups
from agentrl.sandbox.confine import Config
from agentrl.sandbox.link import AT_START, BOOT, Process, ServerBox, base_env, config_error, spawn
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.rootfs import build_rootfs

PATH = "/usr/local/bin:/usr/bin:/bin"
WRITABLE = ("/work", "/tmp", "/dev/shm")
# Joins the cgroups before anything of the box exists, then becomes bubblewrap.
JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 90; shift; done; shift; exec "$@"'


class Boxes:
    """Bubblewrap boxes with a warm fork server each."""

    def __init__(self, options: SandboxOptions) -> None:
        found = shutil.which("bwrap")
        if found is None:
            raise config_error("bubblewrap", "there is no bwrap on PATH", "apt-get install bubblewrap busybox-static")
        if options.image or options.docker_url:
            raise ConfigError("sandbox.image and sandbox.docker_url have no effect with kind 'bubblewrap': remove them")
        self._bwrap = found
        self._root = os.geteuid() == 0
        self.options = options
        self.rootfs = Path(options.rootfs) if options.rootfs else build_rootfs(options.packages)
        if not self.rootfs.is_dir():
            raise ConfigError(f"sandbox.rootfs is {options.rootfs!r}: expected the folder of a root file system")
        reap_cgroups()

    async def start(self, slot: int) -> ServerBox:
        """A box with its cgroup."""
        cgroup = None
        if self.options.cgroups != "off":
            making = asyncio.ensure_future(asyncio.to_thread(make_cgroup, f"{id(self):x}-{slot}", self.options))
            try:
                cgroup = await asyncio.shield(making)
            except asyncio.CancelledError:
                # The thread goes on, and the next box of this slot would have a cgroup of the same name.
                if (cgroup := await making) is not None:
                    await asyncio.to_thread(cgroup.remove)
                raise
        if cgroup is None and self.options.cgroups == "require":
            raise config_error("bubblewrap", "no cgroup can be made", 'run as root, delegate one, or cgroups = "auto"')
        config = self._config(slot, cgroup)
        started: list[Process] = []

        async def stop() -> None:
            for process in started:
                await process.stop()
            if cgroup is not None:
                await asyncio.to_thread(cgroup.remove)

        try:
            started.append(await spawn(self._argv(cgroup), {"PATH": os.defpath}))
        except BaseException:
            await stop()
            raise

        def oom() -> bool:
            return cgroup is not None and cgroup.oom_kills() > 0

        return await started[0].box(f"bubblewrap box {slot}", config, stop, self.options.start_seconds, oom)

    async def close(self) -> None:
        """Nothing is shared between boxes."""

    def _config(self, slot: int, cgroup: Cgroup | None) -> Config:
        options = self.options
        return Config(
            workdir=WRITABLE[0],
            writable=WRITABLE,
            # Limits by user id must not be shared with anybody: an id that no other living process hands out.
            uid=1_000_000 + os.getpid() * 256 + slot % 256 if self._root else None,
            namespace=True,
            mounts=True,
            cgroup=cgroup is not None,
            seccomp=True,
            memory=options.memory_mb << 20,
            disk=options.disk_mb << 20,
            inodes=options.inodes,
            pids=options.pids,
            output=options.output_bytes,
            env=base_env(WRITABLE[0], PATH),
        )

    def _argv(self, cgroup: Cgroup | None) -> list[str]:
        argv = [self._bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        # Root has every right that it takes to start a box; others get them in a user namespace of the box.
        argv += [] if self._root else ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
        argv += ["--as-pid-1", "--clearenv", "--hostname", "box", "--ro-bind", str(self.rootfs), "/"]
        argv += ["--proc", "/proc", "--dev", "/dev"]
        for folder in WRITABLE:
            argv += ["--perms", "0700", "--size", str(self.options.disk_mb << 20), "--tmpfs", folder]
        if cgroup is not None:
            argv += ["--size", "65536", "--tmpfs", "/sys", "--ro-bind", str(cgroup.memory), cgroup.inside]
            argv += ["--remount-ro", "/sys"]
        for name, value in (base_env(WRITABLE[0], PATH) | AT_START).items():
            argv += ["--setenv", name, value]
        argv += ["--chdir", "/", "--", "python3", "-c", BOOT]
        return ["/bin/sh", "-c", JOIN, "sh", *(str(p) for p in (cgroup.procs if cgroup else [])), "--", *argv]
