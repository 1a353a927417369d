"""The table of an evaluation, one data set a line, and the same as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.evaluate.play import Line, rewards_of
from agentrl.evaluate.stats import Estimate, Summary, summarize


def show(sets: Mapping[str, Summary], console: Console) -> None:
    """Print it; intervals are at 95 %."""
    several = sorted({j for summary in sets.values() for j in summary.passes if j > 1})
    table = Table(caption="in brackets: the 95 % interval, over rows")
    for heading in ("data", "rows", "scored", "avg@k", "pass@1", *(f"pass@{j}" for j in several)):
        table.add_column(heading, justify="left" if heading == "data" else "right")
    for name, found in sets.items():
        passes = [str(found.passes[j]) if j in found.passes else "–" for j in (1, *several)]
        table.add_row(
            escape(name),
            str(found.rows),
            f"{found.scored}/{found.episodes}",
            escape(str(found.average)),
            *map(escape, passes),
        )
    console.print(table)


def as_json(sets: Mapping[str, Sequence[Sequence[Line]]], *, passing: float = 1.0) -> dict[str, Any]:
    """All figures: of each data set, and of all episodes together."""
    lines = [line for rows in sets.values() for row in rows for line in row]
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    return {
        "eval/reward": sum(rewards) / len(rewards) if rewards else None,
        "eval/scored": len(rewards),
        "eval/episodes": len(lines),
        "eval/turns_mean": sum(line["metrics"].get("turns", 0.0) for line in lines) / max(len(lines), 1),
        "eval/stops": dict(Counter(line["stop"] for line in lines)),
        "eval/error": next((line["error"] for line in lines if line["reward"] is None and line["error"]), None),
        "sets": {name: _figures(summarize(rewards_of(rows), passing=passing)) for name, rows in sets.items()},
    }


def _figures(summary: Summary) -> dict[str, Any]:
    return {
        "rows": summary.rows,
        "scored": summary.scored,
        "episodes": summary.episodes,
        "k": summary.k,
        "avg": _estimate(summary.average),
        **{f"pass@{j}": _estimate(found) for j, found in summary.passes.items()},
    }


def _estimate(found: Estimate) -> dict[str, float | None]:
    return {"value": found.value, "low": found.low, "high": found.high}
