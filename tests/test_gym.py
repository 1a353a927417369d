"""Gymnasium both ways, and its cases: cases/env_api.jsonl."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check

from agentrl.check import check_env
from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.gym import AsGymnasium, GymEnv, register_env
from agentrl.spaces import AnyText, instruction, read, written
from agentrl.tool import run_tools, tool
from agentrl.types import Info, Message, Row, Step

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent / "cases" / "env_api.jsonl").read_text().splitlines())
}


class Tasks(Env):
    """Says the row's text and a number of the seed; "more" goes on, anything else ends it. One tool."""

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        return ({"text": f"t{n}"} for n in range(4))

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
        self.tools = (self.look,)
        return [{"role": "user", "content": f"{self.row['text']} {self.generator(seed).random()}"}], {}

    async def step(self, action: Message) -> Step:
        if action.get("tool_calls"):
            return Step(await run_tools(self.tools, action), 0.0, False, False, {})
        if action["content"] == "more":
            return Step([{"role": "user", "content": "and?"}], 0.0, False, False, {})
        reward = None if action["content"] == "?" else 1.0
        return Step([{"role": "user", "content": f"bye {self.row['text']}"}], reward, True, False, {})

    @tool
    def look(self, at: str) -> str:
        """Look somewhere.

        Args:
            at: where
        """
        return f"{at}!"


class Said(Env):
    """The row's text as it is."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
        return [{"role": "user", "content": self.row["text"]}], {}

    async def step(self, action: Message) -> Step:
        return Step([{"role": "user", "content": self.row["text"]}], 1.0, True, False, {})


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes environments that are closed afterwards."""
    opened: list[gymnasium.Env[Any, Any]] = []

    def make(*args: Any, **kwargs: Any) -> AsGymnasium:
        opened.append(AsGymnasium(*args, **kwargs))
        return opened[-1]  # type: ignore[return-value]

    yield make
    for env in opened:
        env.close()
    assert not [t for t in threading.enumerate() if t.name == "agentrl-gymnasium"]


def test_i01_what_follows_a_seeded_reset_is_reproducible(made: Any) -> None:
    assert CASES["I01"]["expected"]["second_observations_equal"]
    runs = []
    for _ in range(CASES["I01"]["input"]["runs"]):
        env = made(Tasks)
        runs.append([env.reset(seed=7)[0], env.reset()[0], env.reset()[0]])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3
    env = made(Tasks)
    assert env.reset(seed=8)[0] != runs[0][0]
    again = [env.reset(seed=7)[0], env.reset()[0]]
    assert again == runs[0][:2], "whatever was played before"


async def test_i01_also_for_an_environment_by_itself_and_one_of_gymnasium() -> None:
    async def both(env: Env) -> list[Any]:
        starts = [await env.reset(seed=7), await env.reset()]
        await env.close()
        return starts

    assert await both(Tasks({"text": "t"})) == await both(Tasks({"text": "t"}))
    first, second = await both(Cards({})), await both(Cards({}))
    assert first == second
    assert first[0] != first[1]


def test_i03_every_task_is_played_once_in_order(made: Any) -> None:
    case = CASES["I03"]
    env = made(Tasks, [{"text": text} for text in case["input"]["task_iterator"]])
    seen, last = [], []
    for _ in range(case["input"]["episodes"]):
        observation, info = env.reset()
        seen.append(info["row"]["text"])
        assert observation.startswith(seen[-1])
        observation, _, terminated, _, _ = env.step("done")
        assert terminated
        last.append(observation.removeprefix("bye "))
        with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
            env.step("again")
    assert seen == last == case["expected"]["tasks_seen"]


def test_i07_any_text_is_a_text(made: Any) -> None:
    case = CASES["I07"]["input"]
    for text in [*case["observations"], "\x00\t\r\n", "\ud7ff\ue000", "ﷺ" * 100, " "]:
        env = made(Said, [{"text": text}])
        assert env.observation_space.contains(text)
        observation, _ = env.reset(seed=0)
        assert observation == text
        gymnasium_check(env, skip_render_check=True)
    assert "" in AnyText()
    assert AnyText(3) == AnyText(3) != AnyText(4)
    assert "abcd" not in AnyText(3)
    assert 3 not in AnyText()
    space = AnyText(seed=1)
    assert all(space.sample() in space for _ in range(20))


def test_registered_and_made(made: Any) -> None:
    register_env("agentrl-test/Tasks-v0", Tasks, [{"text": "a"}, {"text": "b"}])
    try:
        with gymnasium.make("agentrl-test/Tasks-v0", render_mode="ansi") as env:
            gymnasium_check(env.unwrapped)
            observation, info = env.reset(seed=1)
            assert observation.startswith("b ")
            assert info["tools"][0]["function"]["name"] == "look"
            assert env.step("more")[0] == "and?"
            called = env.step('{"name": "look", "arguments": {"at": "there"}}')
            assert called[0] == "there!"
            assert called[4]["messages"][0]["role"] == "tool"
            _, reward, terminated, _, info = env.step("?")
            assert math.isnan(reward)
            assert (terminated, info["verdict"]) == (True, False)
            shown: Any = env.render()
            assert "[assistant] more" in shown
            assert "[tool] there!" in shown
    finally:
        del gymnasium.registry["agentrl-test/Tasks-v0"]


async def test_it_works_inside_a_running_loop(made: Any) -> None:
    env = made(Tasks)
    env.reset(seed=1)
    assert env.step("done")[2]
    assert asyncio.get_running_loop().is_running()


def test_rows_do_not_wander_into_callers_hands(made: Any) -> None:
    env = made(Tasks, [{"text": "a", "more": [1]}])
    _, info = env.reset()
    info["row"]["more"].append(2)
    assert env.reset()[1]["row"] == {"text": "a", "more": [1]}
    assert env.reset(options={"row": {"text": "mine"}})[0].startswith("mine")


class Base(gymnasium.Env[Any, Any]):
    """A gymnasium environment that wants to stay in its thread; the action is what it observes."""

    def __init__(self, observed: spaces.Space[Any], acted: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observed, acted
        self.base = sqlite3.connect(":memory:")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.base.execute("select 1")
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.base.execute("select 1")
        return action, np.float32(0.5), np.bool_(True), np.bool_(True), {}

    def close(self) -> None:
        self.base.close()


def gym_env(observed: spaces.Space[Any], acted: spaces.Space[Any], **args: Any) -> GymEnv:
    class Made(GymEnv):
        def make(self) -> gymnasium.Env[Any, Any]:
            return Base(observed, acted)

    return Made({}, **args)


class Cards(GymEnv):
    """Blackjack."""

    def make(self) -> gymnasium.Env[Any, Any]:
        return gymnasium.make("Blackjack-v1")


async def test_a_gymnasium_environment_is_played_in_its_thread() -> None:
    env = gym_env(AnyText(), AnyText(), task="Say it.")
    messages, _ = await env.reset(seed=1)
    assert messages[0]["content"].startswith("Say it.")
    step = await env.step({"role": "assistant", "content": "a\nb"})
    assert step == Step([], 0.5, True, False, {})
    assert [type(value) for value in step[1:4]] == [float, bool, bool]
    with pytest.raises(ContractError, match="call reset first"):
        await env.step({"role": "assistant", "content": "c"})
    await env.close()


async def test_what_is_no_action_is_told_and_costs_what_it_should() -> None:
    env = gym_env(AnyText(), spaces.Discrete(3), actions=["left", "stay", "right"], invalid=-0.1)
    await env.reset(seed=1)
    for _ in range(2):
        step = await env.step({"role": "assistant", "content": "jump"})
        assert step.observation[0]["content"] == (
            "There is no action in 'jump'. Answer with one of: left, stay, right."
        )
        assert (step.reward, step.terminated, step.truncated) == (-0.1, False, False)
    assert (await env.step({"role": "assistant", "content": "not left: Right"})).terminated
    await env.close()


@pytest.mark.parametrize(
    "name", ["Blackjack-v1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("FrozenLake-v1", "CartPole-v1"))]
)
def test_gymnasiums_own_pass_the_check(name: str) -> None:
    report = check_env(GymEnv, args={"id": name})
    assert report.findings == (), report


def test_an_old_environment_is_told_the_contract() -> None:
    class Old(Base):
        def step(self, action: Any) -> Any:
            return super().step(action)[:4]

    class Made(GymEnv):
        def make(self) -> gymnasium.Env[Any, Any]:
            return Old(AnyText(), AnyText())

    report = check_env(Made)
    assert not report.ok
    assert "must return five values" in str(report)
    report = check_env(GymEnv)
    assert "give env.args.id, or define `make`" in str(report)


SPACE = spaces.Dict(
    {
        "move": spaces.Discrete(4, start=1),
        "force": spaces.Box(-1.0, 1.0, (2,), np.float32),
        "flags": spaces.MultiBinary(3),
        "picks": spaces.MultiDiscrete([2, 5]),
        "note": AnyText(),
        "pair": spaces.Tuple((spaces.Discrete(2), AnyText())),
        "list": spaces.Sequence(spaces.Discrete(3)),
    }
)


def test_every_describable_space_is_written_and_read_back() -> None:
    SPACE.seed(5)
    for _ in range(20):
        value = SPACE.sample()
        text = written(SPACE, value)
        back = read(SPACE, f"I think so:\n{text}\n")
        assert SPACE.contains(back)
        assert written(SPACE, back) == text
    told = instruction(SPACE)
    assert '"move": a whole number from 1 to 4' in told
    assert '"force": a list of shape [2] of numbers from -1 to 1' in told


@pytest.mark.parametrize(
    ("space", "text", "value"),
    [
        (spaces.Discrete(5), "the answer is 3", 3),
        (spaces.Discrete(5), "not 3 but 4.", 4),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Discrete(5), "9", "'9'|9 is not allowed"),
        (spaces.Discrete(5), "", "There is no number in ''"),
        (spaces.Discrete(5), "9" * 5000, "is not allowed"),
        (spaces.MultiBinary(2), "[0, 1]", [0, 1]),
        (spaces.MultiBinary(2), "[0, 1, 1]", "does not fit"),
        (spaces.Box(0, 1, (1,)), "[2.5]", "is not allowed"),
        (spaces.Box(0, 1, (1,)), "{broken", "There is no JSON"),
        (spaces.Box(0, 1, (1,)), "[1e999]", "is not allowed"),
        (spaces.Box(0, 255, (1,), np.uint8), "[700]", "does not fit"),
        (spaces.Text(3), "ab c", "is not allowed"),
        (spaces.Discrete(5), "1.5", "There is no number"),
        (spaces.Discrete(9), "3-5", 5),
        (spaces.Discrete(99), "12345678901234567890", "is not allowed"),
        (spaces.MultiBinary(2), "[1, 0] because [x], or {so}", [1, 0]),
        (spaces.MultiBinary(2), "not [1,0] but [0,1]", [0, 1]),
        (spaces.MultiDiscrete([3, 3]), "[1.9, 2]", "whole numbers are needed"),
        (spaces.Sequence(spaces.Text(3)), '"abc"', "a list is needed"),
        (SPACE, "{}", "does not fit"),
        (SPACE, "[" * 5000, "There is no JSON"),
    ],
)
def test_answers_for_spaces(space: spaces.Space[Any], text: str, value: Any) -> None:
    if isinstance(value, str):
        with pytest.raises(ValueError, match=value):
            read(space, text)
    else:
        assert np.asarray(read(space, text)).tolist() == value


def test_what_is_no_text_is_refused_with_the_remedy() -> None:
    image = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    with pytest.raises(ContractError, match="at most 256 are written: define `describe`"):
        written(image, image.sample())
    graph = spaces.Graph(spaces.Discrete(2), spaces.Discrete(2))
    with pytest.raises(ContractError, match="cannot be written as text"):
        instruction(graph)
    with pytest.raises(ContractError, match="name each one, in order"):
        instruction(spaces.Discrete(3), ["left"])
