"""What a run writes and shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from agentrl.monitor.curve import draw_curve
from agentrl.monitor.live import Lines, Panel, make_view
from agentrl.monitor.metrics import MetricsFile, read_metrics

STEP = {"step": 2, "reward/mean": 0.25, "staleness/max": 3, "rollout/tokens_per_second": 512.4, "pool/pooled": 7}


def test_metrics_survive_a_torn_line_and_hold_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = MetricsFile(path)
    first.write("step", {"step": 1, "loss": float("nan"), "lr": 1e-5, "hist": {"a": [1, float("inf")]}})
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    second = MetricsFile(path)
    second.write("eval", {"step": 1, "eval/reward": 0.5})
    second.close()
    step, evaluation = read_metrics(path)
    assert (step["loss"], step["lr"], step["hist"]) == (None, 1e-5, {"a": [1, None]})
    assert evaluation["eval/reward"] == 0.5
    assert "NaN" not in path.read_text()


def test_without_a_terminal_a_step_is_one_line() -> None:
    out = io.StringIO()
    view = make_view("demo", 10, Console(file=out, width=40))
    assert isinstance(view, Lines)
    view.start()
    view.step(STEP)
    view.state({"trainer": "busy"})
    view.note("evaluation at step 2: [0.5]")
    view.stop()
    first, second = out.getvalue().splitlines()
    assert first.startswith("step 2/10  reward 0.250  staleness 3  pool 7  gen tok/s 512  eta 0m")
    assert second == "evaluation at step 2: [0.5]"


def test_on_a_terminal_one_panel_shows_bar_figures_and_notes() -> None:
    out = io.StringIO()
    view = make_view("demo", 10, Console(file=out, width=100, force_terminal=True))
    assert isinstance(view, Panel)
    view.start()
    view.step(STEP)
    view.state(
        {"trainer": "trainer rank 0 waits for 'take' of step 3 to end (2 s)", "engines": "x" * 200, "gate": None}
    )
    view.note("published 1.2")
    view.stop()
    shown = out.getvalue()
    for text in ("demo", "step 2/10", "0.250", "512", "published 1.2", "waits for 'take' of step 3", "xxx…"):
        assert text in shown
    assert "gate" not in shown


def test_curve_is_a_picture_of_the_metrics(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(5):
        metrics.write("step", {"step": step, "reward/mean": step / 5})
    metrics.write("eval", {"step": 4, "eval/reward": 0.9})
    metrics.close()
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    draw_curve(lines, tmp_path / "curve.png", "demo")
    with_eval = (tmp_path / "curve.png").read_bytes()
    assert with_eval.startswith(b"\x89PNG")
    draw_curve(lines[:-1], tmp_path / "curve.png", "demo")
    assert (tmp_path / "curve.png").read_bytes() != with_eval
    assert [p.name for p in tmp_path.glob("*.png")] == ["curve.png"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 0
