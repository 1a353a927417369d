"""What a search found, as text and as a picture."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config import load
from agentrl.errors import ConfigError
from agentrl.simulate.calibrate import Calibration, calibrate
from agentrl.simulate.options import SimulateConfig
from agentrl.simulate.search import Search, Trial, search


def run_simulate(path: Path, overrides: Sequence[str], run: Path | None, plot: Path | None) -> None:
    """`agentrl simulate`: search, print, and draw where a picture is wanted."""
    config = load(SimulateConfig, path, overrides)
    calibration = None if run is None else calibrate(run)
    console = Console(stderr=True, highlight=False)
    with console.status("simulating") as status:
        found = search(config, calibration, told=lambda trial: status.update(f"simulated {_split(trial)}"))
    print(describe(found, calibration))
    if plot is not None:
        draw(found, plot)
        print(f"drawn: {plot}")


def describe(found: Search, run: Calibration | None = None) -> str:
    """Sources, trials and the advice."""
    best = found.best
    parts = [*found.sources, ""]
    if len(found.splits) > 1:
        parts.append(_table(f"splits, η = {found.splits[0].staleness}", found.splits, best))
    parts.append(_table(f"η, {_split(best)}", found.ages, best))
    if run is not None:
        told = run.measured
        parts.append(
            f"the run itself: {told.tokens_per_second:.0f} tokens/s, {told.step_seconds:.2f} s a step, engines idle "
            f"{_percent(told.engine_idle)}, trainer waits {_percent(told.trainer_idle)}, staleness "
            f"{told.staleness_mean:.2f}"
        )
    parts += ["", *_warnings(best)]
    parts.append(f"best: {_split(best)}, η = {best.staleness}: {best.report.tokens_per_second:.0f} tokens/s")
    return "\n".join(parts)


def _split(trial: Trial) -> str:
    each = f" of {trial.parallel}" if trial.parallel > 1 else ""
    return f"{trial.engines} engines{each} and {trial.ranks} trainer ranks ({_percent(trial.share)} generate)"


def _table(title: str, trials: Sequence[Trial], best: Trial) -> str:
    """Plain text: a table that is cut off at the terminal's edge says nothing."""
    lines = [
        title,
        "engines ranks   η   tokens/s  s a step engines: idle paused  reads  batch trainer waits conductor  stale  max",
    ]
    for trial in trials:
        report = trial.report
        lines.append(
            f"{trial.engines:7} {trial.ranks:5} {trial.staleness:3} {report.tokens_per_second:10.0f} "
            f"{report.step_seconds:9.2f} {100 * report.engine_idle:11.0f} % {100 * report.engine_paused:4.0f} % "
            f"{100 * report.engine_prefill:4.0f} % {report.decode_batch:6.0f} {100 * report.trainer_idle:11.0f} % "
            f"{100 * report.conductor_busy:7.0f} % "
            f"{report.staleness_mean:6.2f} {report.staleness_max:4}{'  <' if trial is best else ''}"
        )
    return "\n".join(lines)


def _warnings(best: Trial) -> list[str]:
    told = [
        f"{_percent(share)} of the trained episodes ended by {stop}: see rollout.{limit}"
        for stop, limit in (("time_limit", "time_limit"), ("max_tokens", "max_tokens"))
        if (share := best.report.stops.get(stop, 0.0)) > 0.02
    ]
    if best.report.conductor_busy > 0.7:
        told.append(
            f"the conductor is busy for {_percent(best.report.conductor_busy)} of the time: more devices wait for it"
        )
    if best.scale > 1:
        told.append(f"simulated at 1/{best.scale} of the size: what waits for the longest episode is a little too good")
    return told


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def draw(found: Search, path: Path) -> None:
    """tokens/s, idle shares and staleness by split and by η, as a PNG."""
    try:
        figure_type = importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'agentrl[train]'") from error
    figure = figure_type(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, [trial.share for trial in found.splits], found.splits, "share of the devices that generate")
    _panel(right, [float(trial.staleness) for trial in found.ages], found.ages, "η")
    partial = path.with_suffix(".tmp.png")
    figure.savefig(partial, dpi=120)
    os.replace(partial, path)


def _panel(axes: Any, places: Sequence[float], trials: Sequence[Trial], label: str) -> None:
    axes.plot(places, [t.report.tokens_per_second for t in trials], marker="o", color="black", label="tokens/s")
    for place, trial in zip(places, trials, strict=True):
        told = (f"{trial.report.staleness_mean:.1f}", (place, trial.report.tokens_per_second))
        axes.annotate(*told, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xlabel=label, ylabel="trained tokens/s; the numbers: mean staleness")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    shares = axes.twinx()
    shares.plot(places, [t.report.engine_idle for t in trials], marker=".", ls="--", color="C0", label="engines idle")
    shares.plot(places, [t.report.trainer_idle for t in trials], marker=".", ls="--", color="C3", label="trainer waits")
    shares.set(ylabel="share of the time")
    shares.set_ylim(0, 1)
    axes.ticklabel_format(axis="y", style="plain")
    lines = [*axes.get_legend_handles_labels()[0], *shares.get_legend_handles_labels()[0]]
    axes.legend(handles=lines, loc="lower center")
