"""Programs as plain child processes with resource limits. **No boundary**: for trusted code only.

A program here reads what its user may read, opens sockets, and can kill the process that started it. It exists for
developing on a machine without bubblewrap and Docker, and says so on every start.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import warnings
from pathlib import Path

from agentrl.sandbox.confine import Config
from agentrl.sandbox.link import BOOT, ServerBox, base_env, spawn
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.owner import discard_folder, private_folder, reap_folders


class NoBoundaryWarning(UserWarning):
    """Model-written code is about to run with the rights of this process."""


class Boxes:
    """Boxes that are only folders. See the module's warning."""

    def __init__(self, options: SandboxOptions) -> None:
        warnings.warn(
            "sandbox kind 'subprocess' is NO boundary: programs have your rights, files and network. Trusted code "
            "only; use kind 'bubblewrap' or 'docker' for anything that a model wrote.",
            NoBoundaryWarning,
            stacklevel=4,
        )
        self.options = options
        reap_folders()
        self._folder = private_folder()

    async def start(self, slot: int) -> ServerBox:
        """A folder, and a fork server beside it."""
        folder = self._folder / f"box-{slot}"
        folder.mkdir()
        options, path = self.options, f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
        config = Config(
            workdir=str(folder),
            writable=(str(folder),),
            uid=None,
            namespace=False,
            mounts=False,
            cgroup=False,
            seccomp=False,
            memory=options.memory_mb << 20,
            disk=options.disk_mb << 20,
            inodes=options.inodes,
            pids=options.pids,
            output=options.output_bytes,
            env={**base_env(str(folder), path), "TMPDIR": str(folder)},
        )
        process = await spawn([sys.executable, "-c", BOOT], config.env)

        async def stop() -> None:
            await process.stop()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

        return await process.box(f"subprocess box {slot}", config, stop, options.start_seconds)

    async def close(self) -> None:
        """Remove the folder of all boxes."""
        await asyncio.to_thread(discard_folder, self._folder)


__all__ = ["Boxes", "NoBoundaryWarning"]
