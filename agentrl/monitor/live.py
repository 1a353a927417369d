"""What a person sees while a run goes on: one calm panel on a terminal, a line a step anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text


class View(Protocol):
    """Shows a run.

    `step` gets the merged metrics of a finished step, `state` what each part does now, `note` one sentence about
    anything else.
    """

    def start(self) -> None: ...
    def step(self, metrics: Mapping[str, Any]) -> None: ...
    def state(self, state: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def stop(self) -> None: ...


def make_view(name: str, steps: int, console: Console | None = None) -> View:
    """A panel where the console is a terminal, else plain lines."""
    console = console or Console(stderr=False, highlight=False)
    return Panel(name, steps, console) if console.is_terminal else Lines(steps, console)


class Lines:
    """A line a step, for logs and pipes."""

    def __init__(self, steps: int, console: Console) -> None:
        self._console = console
        self._clock = _Clock(steps)

    def start(self) -> None:
        self._clock.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        eta = self._clock.eta(int(metrics["step"]))
        parts = [
            f"step {metrics['step']}/{self._clock.steps}",
            *(f"{k} {v}" for k, v in summary(metrics)),
            f"eta {eta}",
        ]
        self._print("  ".join(parts))

    def state(self, state: Mapping[str, Any]) -> None:
        """A log is not the place for what changes every other second: `agentrl status` tells it."""

    def note(self, text: str) -> None:
        self._print(text)

    def stop(self) -> None:
        return

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class Panel:
    """A progress bar, the figures of the last step, what each part does now, and the last notes."""

    def __init__(self, name: str, steps: int, console: Console) -> None:
        self._name = name
        self._clock = _Clock(steps)
        self._console = console
        self._metrics: Mapping[str, Any] = {"step": 0}
        self._state: Mapping[str, Any] = {}
        self._notes: list[str] = []
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=40),
            TextColumn("step {task.completed}/{task.total}  eta {task.fields[eta]}"),
            console=console,
        )
        self._task = self._bar.add_task(name, total=steps, eta="…")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2)

    def start(self) -> None:
        self._clock.start()
        self._live.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = metrics
        step = int(metrics["step"])
        self._bar.update(self._task, completed=step, eta=self._clock.eta(step))

    def state(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def note(self, text: str) -> None:
        self._notes = [*self._notes[-5:], text]

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for key, value in summary(self._metrics):
            table.add_row(Text(key, style="dim"), value)
        for part in _PARTS:
            if self._state.get(part):
                table.add_row(Text(part, style="dim"), Text(str(self._state[part]), no_wrap=True, overflow="ellipsis"))
        return Group(self._bar, table, *(Text(note, style="dim") for note in self._notes))


def summary(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The few figures that say how a run goes, of those that are there."""
    shown = []
    for label, key, form in _SHOWN:
        value = metrics.get(key)
        if isinstance(value, int | float):
            shown.append((label, format(value, form)))
    return shown


_PARTS = ("trainer", "engines", "gate", "pool")
_SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("eval", "eval/reward", ".3f"),
    ("loss", "loss", ".4f"),
    ("eval loss", "eval/loss", ".4f"),
    ("staleness", "staleness/max", ".0f"),
    ("pool", "pool/pooled", ".0f"),
    ("gen tok/s", "rollout/tokens_per_second", ".0f"),
    ("train tok/s", "tokens_per_second", ".0f"),
    ("seconds", "seconds/step", ".2f"),
)


class _Clock:
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._begin = time.monotonic()
        self._marks: list[tuple[int, float]] = []

    def start(self) -> None:
        self._begin = time.monotonic()

    def eta(self, step: int) -> str:
        """From the last 20 steps: the first ones compile, load and warm up."""
        self._marks = [*self._marks[-20:], (step, time.monotonic())]
        first, since = self._marks[0] if len(self._marks) > 1 else (0, self._begin)
        if step <= first:
            return "…"
        left = (self.steps - step) * (time.monotonic() - since) / (step - first)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
