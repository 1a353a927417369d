"""Group rewards in a run: added before a group is pooled, found by their path, and no verdict where they raise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.errors import ConfigError, RunError
from agentrl.reward.group import GroupReward
from agentrl.rollout.group import group_reward_of
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.pool import Pool, Take
from agentrl.rollout.runner import Runner
from agentrl.testing.clock import run_virtual
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.session import byte_sessions
from agentrl.types import Episode, Message, Step, Version


class Same(Env):
    """Everybody earns 1."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        return [{"role": "user", "content": "go"}], {}

    async def step(self, action: Message) -> Step:
        return Step([], 1.0, True, False, {})


def first_best(episodes: Sequence[Episode]) -> list[float]:
    assert threading.current_thread() is not threading.main_thread(), "a plain function may compute for long"
    return [0.5 if episode.sample == 0 else 0.0 for episode in episodes]


async def best_by_coroutine(episodes: Sequence[Episode]) -> list[float]:
    return [float(episode.sample) for episode in episodes]


def raising(episodes: Sequence[Episode]) -> list[float]:
    raise ZeroDivisionError("nobody to compare with")


def taken(folder: Path, reward: GroupReward | None, **settings: Any) -> Take:
    takes: list[Take | None] = []

    async def body() -> None:
        options = RolloutOptions.model_validate({"groups_per_step": 1, "samples": 2, **settings})
        pool = await Pool.open(folder / "pool.sqlite")
        runner = Runner(
            options,
            pool=pool,
            rows=[{"n": 1}],
            seed=1,
            env="same",
            make_env=Same,
            make_agent=Agent,
            open_session=byte_sessions(ScriptedEngine(lambda prompt: [65])),
            group_reward=reward,
        )
        await runner.start(Version(1, 0))
        running = asyncio.create_task(runner.run())
        try:
            takes.append(await runner.take(0, Version(1, 0), 1000.0))
        finally:
            running.cancel()
            await asyncio.wait([running])
            await pool.close()

    run_virtual(body())
    assert takes[0] is not None
    return takes[0]


@pytest.mark.parametrize(("reward", "earned"), [(first_best, [1.5, 1.0]), (best_by_coroutine, [1.0, 2.0])])
def test_it_is_added_before_equal_groups_are_filtered(tmp_path: Path, reward: GroupReward, earned: list[float]) -> None:
    (group,) = taken(tmp_path, reward).groups
    assert [episode.reward for episode in group.episodes] == earned
    assert group.episodes[0].turns[-1].parts["group"] == earned[0] - 1.0


def test_it_is_found_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def first(episodes):\n    return [float(e.sample == 0) for e in episodes]\n")
    path = f"{tmp_path / 'mine.py'}:first"
    (group,) = taken(tmp_path, None, group_reward=path).groups
    assert [episode.reward for episode in group.episodes] == [2.0, 1.0]
    with pytest.raises(ConfigError, match="not a function of episodes"):
        group_reward_of(RolloutOptions(group_reward="agentrl.rollout.runner:__doc__"))
    with pytest.raises(ConfigError, match="there is no file"):
        group_reward_of(RolloutOptions(group_reward="nowhere.py:f"))


def test_where_it_raises_nobody_has_a_verdict(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the group reward raised ZeroDivisionError: nobody to compare with") as caught:
        taken(tmp_path, raising, max_failed=2, fail_seconds=0.0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
