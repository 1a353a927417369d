"""The run's folder: what lies where, whose it is, and whether it can be used at all.

runs/<name>/  config.toml       the resolved config: `--resume` reads it
              metrics.jsonl curve.png state.json
              pool.sqlite checkpoints/ model/ logs/<process>.log
              incarnation       the last one used; a label `incarnation.number` never names two sets of weights
              lock              held while a conductor lives
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from agentrl.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")


class RunFolder:
    """Paths of a run, and the few facts that are kept in small files."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.curve = self.path / "curve.png"
        self.state = self.path / "state.json"
        self.pool = self.path / "pool.sqlite"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.logs = self.path / "logs"
        self.job = self.path / "trainer.json"
        self._incarnation = self.path / "incarnation"
        self._lock: IO[str] | None = None

    @property
    def is_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists()

    def open(self, *, resume: bool) -> None:
        """Create or re-open the folder and lock it; ConfigError where that cannot be."""
        if resume and not self.is_run:
            raise ConfigError(f"--resume: {self.path} holds no run (no config.toml): start it without --resume")
        if self.is_run and not resume:
            raise ConfigError(
                f"{self.path} already holds a run: continue it with --resume, give another name, or remove the folder"
            )
        try:
            for folder in (self.path, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.path} cannot be written: {error.strerror or error}; "
                "set run_dir to a folder that you may write"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(f"another agentrl process runs in {self.path}: wait for it, or stop it") from error

    def close(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def locked(self) -> bool:
        """Whether a conductor lives in it, seen from outside."""
        try:
            with (self.path / "lock").open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def next_incarnation(self) -> int:
        """A number never used in this folder before; it is on disk before it is returned."""
        last = int(self._incarnation.read_text()) if self._incarnation.exists() else 0
        write_atomically(self._incarnation, f"{last + 1}")
        return last + 1

    def write_state(self, state: Mapping[str, Any]) -> None:
        """What the run is doing, for `agentrl status`."""
        write_atomically(self.state, json.dumps(state, indent=1, default=str))

    def weights_folder(self, model_bytes: int) -> Path:
        """Where versions are handed over: shared memory with room for three of them, else inside the run."""
        key = hashlib.sha256(str(self.path).encode()).hexdigest()[:12]
        shared = SHARED_MEMORY / f"agentrl-{os.getuid()}-{key}"
        shutil.rmtree(shared, ignore_errors=True)  # what a killed run left
        if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 3 * model_bytes + (64 << 20):
            shared.mkdir(mode=0o700)
            return shared
        inside = self.path / "weights"
        shutil.rmtree(inside, ignore_errors=True)
        inside.mkdir()
        return inside

    def need_space(self, n_bytes: int, what: str) -> None:
        """ConfigError where the disk has less than `n_bytes` free."""
        free = shutil.disk_usage(self.path).free
        if free < n_bytes:
            raise ConfigError(
                f"{self.path} has {free / 2**20:.0f} MiB free and {what} needs about {n_bytes / 2**20:.0f} MiB: "
                "free some space or set run_dir to another disk"
            )


def write_atomically(path: Path, text: str) -> None:
    """Replace the file whole, surviving a crash between any two instructions."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def folder_bytes(folder: Path, pattern: str = "*") -> int:
    """The size of the files in `folder` that match."""
    return sum(p.stat().st_size for p in folder.glob(pattern) if p.is_file())
