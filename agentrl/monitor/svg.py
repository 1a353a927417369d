"""Plots as SVG markup, for a page without scripts. Colours are classes of the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 8, 22


class Line(NamedTuple):
    """Points of one line; None where there is no value. `errors` are half widths of a band."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    errors: Sequence[float | None] = ()
    points: bool = False


def plot(title: str, lines: Sequence[Line]) -> str:
    """A figure with a title, a legend and a sentence for those who do not see it; empty where no line has a value."""
    lines = [line for line in lines if any(y is not None for y in line.ys)]
    if not lines:
        return ""
    frame = _Frame(lines)
    body = frame.axes() + "".join(_drawn(line, i, frame) for i, line in enumerate(lines))
    said = html.escape(f"{title}: {'; '.join(_in_words(line) for line in lines)}", quote=True)
    legend = "".join(
        f'<li><span class="swatch b{i % 8}"></span>{html.escape(line.label)} <b>{number(_last(line))}</b></li>'
        for i, line in enumerate(lines)
    )
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{said}">{body}</svg><ul class="legend">{legend}</ul></figure>'
    )


def number(value: float | None) -> str:
    """Four digits; a dash where there is none."""
    return "–" if value is None else f"{value:.4g}"


class _Frame:
    def __init__(self, lines: Sequence[Line]) -> None:
        xs = [x for line in lines for x in line.xs]
        lows, highs = [], []
        for line in lines:
            for i, y in enumerate(line.ys):
                if y is not None:
                    half = (line.errors[i] if i < len(line.errors) else 0.0) or 0.0
                    lows.append(y - half)
                    highs.append(y + half)
        self.x = (min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
        room = 0.06 * (max(highs) - min(lows)) or abs(max(highs)) * 0.1 or 1.0
        self.y = (min(lows) - room, max(highs) + room)

    def at(self, x: float, y: float) -> str:
        across = LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    def axes(self) -> str:
        parts = []
        for tick in ticks(*self.y):
            left, right = self.at(self.x[0], tick), self.at(self.x[1], tick)
            down = left.partition(",")[2]
            parts.append(f'<path class="grid" d="M{left}L{right}"/>')
            parts.append(f'<text x="{LEFT - 5}" y="{float(down) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
        for tick in ticks(*self.x):
            across = self.at(tick, self.y[0]).partition(",")[0]
            parts.append(f'<text x="{across}" y="{HEIGHT - 6}" text-anchor="middle">{tick:.4g}</text>')
        return "".join(parts)


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers between the two."""
    raw = (high - low) / wanted
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _drawn(line: Line, index: int, frame: _Frame) -> str:
    known = [(x, y, i) for i, (x, y) in enumerate(zip(line.xs, line.ys, strict=True)) if y is not None]
    band = ""
    if line.errors:
        halves = [(x, y, line.errors[i] or 0.0) for x, y, i in known]
        edge = [frame.at(x, y + half) for x, y, half in halves] + [frame.at(x, y - half) for x, y, half in halves[::-1]]
        band = f'<polygon class="band f{index % 8}" points="{" ".join(edge)}"/>'
    path = f'<polyline class="s{index % 8}" points="{" ".join(frame.at(x, y) for x, y, _ in known)}"/>'
    dots = ""
    if line.points or len(known) == 1:
        places = [frame.at(x, y).split(",") for x, y, _ in known]
        dots = "".join(f'<circle class="f{index % 8}" cx="{x}" cy="{y}" r="3"/>' for x, y in places)
    return band + path + dots


def _last(line: Line) -> float | None:
    return next((y for y in reversed(line.ys) if y is not None), None)


def _in_words(line: Line) -> str:
    known = [(y, x) for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
    low, high = min(known), max(known)
    return (
        f"{line.label} ends at {number(known[-1][0])}, lowest {number(low[0])} at {low[1]:g}, "
        f"highest {number(high[0])} at {high[1]:g}"
    )
