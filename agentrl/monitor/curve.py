"""curve.png: the reward (or loss) over steps, with the held-out evaluations."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


def draw_curve(lines: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the "step" and "eval" lines of a metrics file; the picture replaces the old one whole."""
    try:
        figure_type = importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise ConfigError("curve.png needs matplotlib: pip install 'agentrl[train]'") from error
    name, label = ("reward/mean", "reward") if any("reward/mean" in x for x in lines) else ("loss", "loss")
    held_out = "eval/reward" if label == "reward" else "eval/loss"
    figure = figure_type(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for kind, key, style in (
        ("step", name, {"label": f"training {label}", "alpha": 0.7}),
        ("eval", held_out, {"label": f"held-out {label}", "marker": "o", "linewidth": 2}),
    ):
        points = [(x["step"], x[key]) for x in lines if x["kind"] == kind and isinstance(x.get(key), int | float)]
        if points:
            axes.plot([p[0] for p in points], [p[1] for p in points], **style)
    axes.set(xlabel="step", ylabel=label, title=title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    partial = path.with_suffix(".tmp.png")
    figure.savefig(partial, dpi=120)
    os.replace(partial, path)
