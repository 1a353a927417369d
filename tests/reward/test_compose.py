"""Rewards made of parts: weights, logging, deadlines, verdicts, TOML."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, ContractError
from agentrl.reward.compose import Composed, Part, compose
from agentrl.reward.group import reward_group
from agentrl.reward.math import MathReward
from agentrl.reward.score import Score
from agentrl.types import Episode, Group, Stop, Turn

MINE = """
import time

def brief(completion, row):
    return len(completion) < row["limit"]

def bonus(completion, row, per_word=0.5):
    return per_word * len(completion.split())

def hang(completion, row):
    while True:
        pass

async def later(completion, row):
    return 1.0

class Starts:
    def __init__(self, text):
        self.text = text
    def __call__(self, completion, row):
        return completion.startswith(self.text)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "my_rewards.py").write_text(MINE)
    return str(tmp_path / "my_rewards.py")


async def test_every_part_is_logged_and_weighted(mine: str) -> None:
    toml = f"""
    correct = {{path = "agentrl.reward.math:MathReward"}}
    brief = {{path = "{mine}:brief", weight = 0.25}}
    words = {{path = "{mine}:bonus", weight = 0, args = {{per_word = 2}}}}
    starts = {{path = "{mine}:Starts", weight = -1, args = {{text = "Hm"}}}}
    worked = {{path = "{mine}:bonus", weight = 0.1, worker = true, args = {{per_word = 1}}}}
    """
    found = await compose(tomllib.loads(toml))("so \\boxed{0.50}", {"answer": "1/2", "limit": 20})
    assert found.value == pytest.approx(1 + 0.25 + 0.2)
    assert found.parts == {
        "correct": 1.0, "correct/answered": 1.0, "brief": 1.0, "words": 4.0, "starts": 0.0, "worked": 2.0,
    }  # fmt: skip
    assert found.info["math_reason"] == "equal"


async def test_a_part_without_a_verdict_leaves_none() -> None:
    gold = {"answer": "see the figure \\includegraphics{x}"}
    both = Composed({"correct": Part(MathReward()), "other": Part(lambda text, row: 1.0)})
    found = await both("\\boxed{5}", gold)
    assert (found.value, found.parts["other"], found.info["math_reason"]) == (None, 1.0, "gold_unparseable")
    logged = Composed({"correct": Part(MathReward(), weight=0), "other": Part(lambda text, row: 1.0)})
    assert (await logged("\\boxed{5}", gold)).value == 1.0


async def test_slow_parts_have_no_verdict(mine: str) -> None:
    async def slow(completion: str, row: dict[str, Any]) -> float:
        await asyncio.sleep(60)
        return 1.0

    found = await Composed({"slow": Part(slow, seconds=0.05)})("", {})
    assert (found.value, "no verdict within 0.05 s" in found.info["slow_error"]) == (None, True)
    killed = await compose({"hang": {"path": f"{mine}:hang", "worker": True, "seconds": 0.5}})("", {})
    assert (killed.value, "longer than 0.5 s" in killed.info["hang_error"]) == (None, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": {"path": "nowhere:f"}}, "there is no module 'nowhere'"),
        ({"a": {"path": "MINE:brif"}}, "did you mean 'brief'"),
        ({"a": {"path": "MINE:brief", "wieght": 1}}, "wieght"),
        ({"a": "MINE:brief"}, "expected a table"),
        ({"a": {"path": "MINE:MINE_TEXT"}}, "has no 'MINE_TEXT'"),
        ({"a": {"path": "MINE:Starts"}}, "does not take args"),
        ({"a": {"path": "MINE:later", "worker": True}}, "needs a plain function"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str, mine: str) -> None:
    filled = eval(repr(settings).replace("MINE:", f"{mine}:"))
    with pytest.raises(ConfigError, match=message):
        compose(filled)
    with pytest.raises(ContractError, match="weight 0"):
        Composed({"a": Part(lambda text, row: 1.0, weight=0)})


def _episode(sample: int, reward: float | None) -> Episode:
    turns = (Turn(0, None, 0, 0.5), Turn(1, None, 0, reward))
    return Episode(3, sample, 0, 1, {}, (), turns, (), Stop.FINISHED)


async def test_group_rewards_are_added_to_the_last_turn() -> None:
    group = Group(3, 0, 0, "env", tuple(_episode(i, r) for i, r in enumerate([1.0, None, 0.0, 0.0])))

    async def best(episodes: Any) -> list[float | Score]:
        assert [episode.sample for episode in episodes] == [0, 2, 3]
        return [Score(0.5, {"rank": 1.0}), 0.0, Score(None)]

    found = await reward_group(group, best, name="rank")
    assert [episode.reward for episode in found.episodes] == [2.0, None, 0.5, None]
    assert found.episodes[0].turns[-1].parts == {"rank/rank": 1.0, "rank": 0.5}
    with pytest.raises(ContractError, match="gave 1 rewards for 3 episodes"):
        await reward_group(group, lambda episodes: [1.0])
