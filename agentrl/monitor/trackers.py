"""Other places where metrics go: TensorBoard, Weights & Biases, Trackio. metrics.jsonl is always written.

A tracker lives in a thread of its own, so that no network and no disk of its holds the run up, and one that fails is
left behind with a sentence. Only the "step" and "eval" lines go out, with the figures under their own names.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import ConfigError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
WAITING = 10_000
CLOSE_SECONDS = 30.0


class Tracker(Protocol):
    """Where figures of a step go. Made, used and closed in one thread."""

    def log(self, step: int, figures: Mapping[str, float], time: float) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(run / "tensorboard"))

    def log(self, step: int, figures: Mapping[str, float], time: float) -> None:
        """One event with all figures."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(self._event(wall_time=time, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """A run of the project `agentrl`; $WANDB_PROJECT, $WANDB_MODE=offline and the others of wandb's own hold."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "agentrl"),
            name=run.name,
            id=_identity(run),
            dir=str(run),
            config=dict(config),
            resume="allow",
            settings=wandb.Settings(console="off"),  # our output is the person's
        )

    def log(self, step: int, figures: Mapping[str, float], time: float) -> None:
        """One row; `step` is a figure too, for a resume goes back and wandb's own step may not."""
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """A local run of the project `agentrl`: `trackio show`; $TRACKIO_DIR and the others of trackio's own hold."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._trackio = importlib.import_module("trackio")
        quiet = {"auto_log_cpu": False, "auto_log_gpu": False}  # our figures alone
        self._trackio.init(project="agentrl", name=_identity(run), config=dict(config), resume="allow", **quiet)

    def log(self, step: int, figures: Mapping[str, float], time: float) -> None:
        """One row."""
        self._trackio.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


KINDS: Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """ConfigError where a tracker's package is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(f"monitor.trackers names {name!r}, which is not installed: pip install {PACKAGES[name]}")


class Trackers:
    """All of a run's. `put` returns at once and raises nothing."""

    def __init__(
        self, names: Sequence[str], run: Path, config: Mapping[str, Any], on_error: Callable[[str], None]
    ) -> None:
        self._lanes = [_Lane(name, run, config, on_error) for name in names]

    def put(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        if line.get("kind") in ("step", "eval") and isinstance(line.get("step"), int):
            for lane in self._lanes:
                lane.put(line)

    def close(self) -> None:
        """Hand over what waits and finish, within `CLOSE_SECONDS` for each."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    def __init__(self, name: str, run: Path, config: Mapping[str, Any], on_error: Callable[[str], None]) -> None:
        self._name, self._run, self._config, self._on_error = name, run, config, on_error
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, line: Mapping[str, Any]) -> None:
        try:
            self._queue.put_nowait(line)
        except queue.Full:  # it hangs: the newest figures are left out
            pass

    def close(self) -> None:
        self.put_end()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._on_error(f"{self._name} did not finish within {CLOSE_SECONDS:.0f} s: it is left behind")

    def put_end(self) -> None:
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            pass

    def _work(self) -> None:
        try:
            tracker = KINDS[self._name](self._run, self._config)
            while (line := self._queue.get()) is not None:
                tracker.log(int(line["step"]), figures_of(line), float(line["time"]))
            tracker.close()
        except Exception as error:  # somebody else's code and network: the run goes on without it
            self._on_error(f"{self._name} gets no more figures: {type(error).__name__}: {error}")


def figures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line; those of environments as `envs/NAME/figure`."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if key in ("kind", "time", "step"):
            continue
        if isinstance(value, int | float):
            found[key] = float(value)
        elif key == "envs" and isinstance(value, Mapping):
            for env, figures in value.items():
                found |= {f"envs/{env}/{k}": float(v) for k, v in figures.items() if isinstance(v, int | float)}
    return found


def _identity(run: Path) -> str:
    """The same for every resume of a run."""
    return f"{run.name}-{hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:8]}"
