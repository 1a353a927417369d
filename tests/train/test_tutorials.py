"""The classes in docs/own_algorithm.md are what a reader copies: they load by name, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.train import algorithm
from agentrl.train.options import PRESETS, AlgorithmOptions, check_algorithm
from tests.train.playing import learn, make_model

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "own_algorithm.md"


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The page's Python blocks as importable modules, by the name in their first line."""
    found = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, body in found:
        (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    return dict(found)


@pytest.mark.parametrize(
    ("options", "metric"),
    [
        (AlgorithmOptions(name="my_grpo:GRPO"), "ratio/clip_fraction"),
        (AlgorithmOptions(name="my_loss:Tethered", args={"price": 0.5}), "price"),
    ],
)
def test_the_pages_classes_learn(
    blocks: dict[str, str], tmp_path: Path, options: AlgorithmOptions, metric: str
) -> None:
    check_algorithm(options)
    chosen = algorithm.load(options)
    rewards, metrics = learn(make_model(tmp_path / "model"), chosen, steps=60, lr=1e-2, minibatches=2, enough=0.8)
    assert max(rewards) > 0.8, rewards
    assert metric in metrics[-1]


def test_ppo_becomes_grpo_in_few_lines(blocks: dict[str, str]) -> None:
    assert len([line for line in blocks["my_grpo"].splitlines() if line.strip()]) <= 12


def test_the_page_names_all_that_is_shipped() -> None:
    page = (DOCS / "algorithms.md").read_text()
    assert [name for name in PRESETS if f"| `{name}` |" not in page] == []
