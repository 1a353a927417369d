"""Settings of a sandbox. Every limit holds for one box."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SandboxOptions(BaseModel):
    """Which kind of box, how many, and what one may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    """"bubblewrap", "docker", "subprocess" (no boundary: trusted code only), or "package.module:Class" of your own.
    Has no default: where model-written code runs is always somebody's decision."""
    slots: int = Field(default=max(2, os.cpu_count() or 2), ge=1, le=1024)
    """Boxes at once; further users wait in line."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory of all its processes together (with cgroups), else of each process."""
    pids: int = Field(default=64, ge=8)
    """Processes and threads."""
    cpu: float = Field(default=1.0, gt=0)
    """CPU cores (with cgroups)."""
    cgroups: Literal["auto", "require", "off"] = "auto"
    """bubblewrap: limit the whole box with a cgroup where one can be made; insist on it; or never."""
    disk_mb: int = Field(default=64, ge=1)
    """Size of the working directory; /tmp and /dev/shm have as much each."""
    inodes: int = Field(default=16_384, ge=256)
    """Files and directories in each of them."""
    output_bytes: int = Field(default=1 << 20, ge=1024)
    """Most a program may write to stdout, and to stderr; one that writes more is killed and marked `truncated`."""
    start_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for a box to start."""
    rootfs: str = ""
    """bubblewrap: a root file system to use instead of the one built from this Python."""
    packages: tuple[str, ...] = ()
    """bubblewrap, docker: installed distributions (and their needs) to add to the root file system, e.g. "pytest"."""
    image: str = ""
    """docker: an image (pulled where not local; it must hold python3) instead of the one built from this Python."""
    docker_url: str = ""
    """docker: the engine's address; else DOCKER_HOST, else its usual socket."""
