"""Gymnasium both ways, at the edges: options, failed resets, vectors, odd rewards."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.gym import AsGymnasium, GymEnv, register_env
from agentrl.types import Info, Message, Step


class Wants(Env):
    """Says its reset's options; fails at the text "none"."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
        if self.row["text"] == "none":
            raise ValueError("no such text")
        return [{"role": "user", "content": f"{self.row['text']} {options}"}], {}

    async def step(self, action: Message) -> Step:
        return Step([], 0.0, False, False, {})


def test_options_reach_the_environment_and_a_failed_reset_begins_nothing() -> None:
    env = AsGymnasium(Wants, [{"text": "a"}, {"text": "b"}])
    seed: Any = np.int64(1)
    assert env.reset(seed=seed, options={"level": 3})[0] == "b {'level': 3}"
    assert env.reset(options={"row": {"text": "c"}})[0] == "c None"
    with pytest.raises(ValueError, match="no such text"):
        env.reset(options={"row": {"text": "none"}})
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("x")
    env.close()


def test_many_at_once() -> None:
    register_env("Wants-v0", Wants, [{"text": "a"}, {"text": "b"}])
    try:
        vector = gymnasium.make_vec("Wants-v0", num_envs=2, vectorization_mode="sync")
        assert vector.reset(seed=0)[0] == ("a None", "b None")
        vector.close()
        with pytest.raises(ValueError, match="shared_memory"):
            gymnasium.make_vec("Wants-v0", num_envs=2, vectorization_mode="async")
    finally:
        del gymnasium.registry["Wants-v0"]


class Pays(gymnasium.Env[Any, Any]):
    """Gives what it is told to give."""

    observation_space = spaces.Discrete(3)
    action_space = spaces.Discrete(3)
    pays: Any = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, Any, bool, bool, dict[str, Any]]:
        return action, self.pays, False, False, {}


class PaysEnv(GymEnv):
    def make(self) -> gymnasium.Env[Any, Any]:
        return Pays()


async def test_rewards_of_gymnasium_are_numbers_and_answers_may_come_in_parts() -> None:
    env = PaysEnv({"seed": 1})
    await env.reset(seed=1)
    said: Message = {"role": "assistant", "content": [{"type": "text", "text": "1"}]}
    assert isinstance(env.gym, Pays)
    given: tuple[tuple[Any, float], ...] = ((True, 1.0), (np.array([2.0]), 2.0), (np.float32(3), 3.0))
    for pays, earned in given:
        env.gym.pays = pays
        assert (await env.step(said)).reward == earned
    for pays in (None, "1", math.nan, np.array([1.0, 2.0])):
        env.gym.pays = pays
        with pytest.raises(ContractError, match="reward must be a finite number"):
            await env.step(said)
    await env.close()
