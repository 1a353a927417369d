"""The report: one file, no script, hostile text escaped."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.monitor.report import write_report
from agentrl.monitor.sample import Shape, make_sample_run
from agentrl.monitor.svg import Line, plot, ticks

HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(2)>",
    "</pre></style><style>*{}</style>",
    "\u202ex\u0000",
)
OURS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "pre", "b", "span", "article"),
    *("table", "tr", "th", "td", "div", "figure", "figcaption", "ul", "li", "details", "summary"),
    *("svg", "path", "text", "polyline", "polygon", "circle"),
}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes += attrs


def test_a_report_holds_curves_faults_and_episodes_and_no_markup_of_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_sample_run(run, Shape(steps=10, groups=4, samples=3, env=HOSTILE[1], texts=HOSTILE))
    state = {"phase": HOSTILE[0], "error": HOSTILE[1], "time": 0}
    (run / "state.json").write_text(json.dumps(state))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "fault", "time": 1.0, "what": HOSTILE[0], "error": HOSTILE[2]}) + "\n")
    out = tmp_path / "report.html"
    write_report(run, out)
    text = out.read_text()
    tags = Tags()
    tags.feed(text)
    assert set(tags.seen) <= OURS
    assert tags.seen["style"] == 1
    assert tags.seen["svg"] >= 10
    assert tags.seen["details"] >= 12
    assert not any(name.startswith("on") or name in ("href", "src", "style") for name, _ in tags.attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\u202e" not in text
    assert "⟨202e⟩x" in text
    assert "default-src 'none'" in text
    assert "[env]" in text


def test_a_run_without_episodes_and_one_that_is_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("name = 'run'\n")
    write_report(run, tmp_path / "report.html")
    assert "<h2>Episodes</h2>" not in (tmp_path / "report.html").read_text()
    with pytest.raises(ConfigError, match="no run's folder"):
        write_report(tmp_path / "none", tmp_path / "report.html")
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


def test_a_plot_is_xml_and_told_in_words() -> None:
    line = Line("a <b> & c", [1, 2, 3], [0.5, None, 1.5], [0.1, None, None])
    figure = plot("Reward", [line, Line("empty", [1], [None])])
    tree = ET.fromstring(figure)
    svg = tree.find("svg")
    assert svg is not None
    assert svg.get("aria-label") == "Reward: a <b> & c ends at 1.5, lowest 0.5 at 1, highest 1.5 at 3"
    line_of = svg.find("polyline")
    assert line_of is not None
    points = [tuple(float(x) for x in point.split(",")) for point in line_of.get("points", "").split()]
    assert len(points) == 2
    assert points[0][0] < points[1][0]
    assert points[0][1] > points[1][1]
    assert plot("Nothing", [Line("empty", [1], [None])]) == ""


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 60, [0, 20, 40, 60]),
        (-0.3, 0.25, [-0.2, 0, 0.2]),
        (1e-6, 5e-6, [1e-6, 2e-6, 3e-6, 4e-6, 5e-6]),
    ],
)
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(found)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.5, 1e9])
def test_a_constant_is_drawn(value: float) -> None:
    assert "polyline" in plot("c", [Line("c", [1.0], [value])])
