"""Text can be read in both themes: WCAG 2.2's contrast, computed from theme.css."""

from __future__ import annotations

import re

import pytest

from agentrl.monitor.app import STATIC

BLOCKS = re.findall(r"^( *):root([^{]*)\{([^}]*)\}", (STATIC / "theme.css").read_text(), re.MULTILINE)
THEMES = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", body)) for _, _, body in BLOCKS]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_there_are_two_themes_and_the_dark_one_stands_twice() -> None:
    assert len(THEMES) == 3
    assert THEMES[1] == THEMES[2]
    assert set(THEMES[0]) == set(THEMES[1])


def mixed(color: str, paper: str, share: float) -> str:
    parts = [(int(color[i : i + 2], 16), int(paper[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)


@pytest.mark.parametrize("index", [0, 1], ids=["light", "dark"])
def test_tokens_can_be_read_on_their_colours(index: int) -> None:
    theme = THEMES[index]
    (strongest,) = re.findall(r"--strongest: ([\d.]+)", BLOCKS[index][2])
    for color, share in (("c0", float(strongest)), ("c1", float(strongest)), *((f"c{i}", 0.35) for i in range(8))):
        assert contrast(theme["ink"], mixed(theme[color], theme["panel"], share)) >= 4.5, (color, share)


@pytest.mark.parametrize("theme", THEMES[:2], ids=["light", "dark"])
def test_text_and_lines_stand_out(theme: dict[str, str]) -> None:
    for paper in ("paper", "panel"):
        for ink in ("ink", "muted", "accent", "bad"):
            assert contrast(theme[ink], theme[paper]) >= 4.5, (ink, paper)
        for line in ("busy", *(f"c{i}" for i in range(8))):
            assert contrast(theme[line], theme[paper]) >= 3.0, (line, paper)
