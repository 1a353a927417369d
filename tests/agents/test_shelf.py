"""Agents of the shelf, in the real loop and the real endpoint over a scripted engine: what is asked and recorded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import Agent
from agentrl.agents.black_box import BlackBox
from agentrl.agents.compact import Compact
from agentrl.agents.in_turn import InTurn
from agentrl.agents.pair import Pair
from agentrl.agents.react import ReAct
from agentrl.agents.reflect import Reflect
from agentrl.agents.single import Single
from agentrl.agents.tool_loop import ToolLoop
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.env import Env
from agentrl.envs.bargain import Bargain
from agentrl.envs.black_box import BlackBox as BlackBoxEnv
from agentrl.envs.calculator import Calculator
from agentrl.envs.guess_number import GuessNumber
from agentrl.errors import ConfigError
from agentrl.rollout.episode import EpisodeSpec, Limits, Outcome, run_episode
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import make_tiny_model
from agentrl.tool import Tool, tool
from agentrl.types import Episode, SplitReason, Stop
from tests.sandbox.kinds import eventually, long_sleep, running

SUM = {"question": "2 + 3 =", "expression": "2 + 3", "answer": "5"}
MakeAgent = Callable[[Sequence[Tool]], Agent]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(make_tiny_model(tmp_path_factory.mktemp("tiny"), max_length=65536))


class Stage:
    """Plays an episode in which the policy says `texts` one after the other; `prompts` is what it was shown."""

    def __init__(self, template: ChatTemplate, *texts: str) -> None:
        self.prompts: list[str] = []
        said = iter(texts)

        def reply(prompt: Any) -> list[int]:
            self.prompts.append(template.decode(prompt.tolist()))
            tokens: list[int] = template.encode_text(next(said) + "<|im_end|>").tolist()
            return tokens

        self.endpoint = Endpoint(ScriptedEngine(reply, decode=template.decode), template)

    async def play(self, env: Env, make_agent: MakeAgent, *, served: bool = False, seconds: float = 600.0) -> Outcome:
        if served:
            await self.endpoint.start()
        session = self.endpoint.open("0", seed=1)
        deadline = asyncio.get_running_loop().time() + seconds
        spec = EpisodeSpec(0, 0, 0, 1, env.row)
        try:
            return await run_episode(env, make_agent, session, spec, Limits(12, deadline, 60.0))
        finally:
            await self.endpoint.stop()

    async def whole(self, env: Env, make_agent: MakeAgent, **settings: Any) -> Episode:
        outcome = await self.play(env, make_agent, **settings)
        assert outcome.episode.stop is Stop.FINISHED, outcome.episode.error
        return outcome.episode


def trained(episode: Episode) -> list[int]:
    """Sampled tokens a trajectory; everything that was sampled must be trainable."""
    return [int(trajectory.loss_mask.sum()) for trajectory in episode.trajectories if not trajectory.abandoned]


def places(episode: Episode) -> list[tuple[int, int | None, float | None]]:
    return [(turn.index, turn.trajectory, turn.reward) for turn in episode.turns]


async def test_single_remembers_nothing(template: ChatTemplate) -> None:
    stage = Stage(template, "5", "6", "7")
    episode = await stage.whole(
        GuessNumber({"low": 1, "high": 9, "secret": 7}), lambda tools: Single(tools, system="Guess.")
    )
    assert episode.reward == 1.0
    assert "higher" in stage.prompts[2]
    assert "5" not in stage.prompts[2].replace("higher", "")
    assert len(episode.trajectories) == 3


async def test_react_acts_in_plain_text(template: ChatTemplate) -> None:
    stage = Stage(template, 'Thought: hm\nAction: calc({"expression": "2 + 3"})', "Thought: I see (5).\nAnswer: 5")
    episode = await stage.whole(Calculator(SUM), ReAct)
    assert episode.reward == 1.0
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert "calc(" in stage.prompts[0]
    assert "Observation: 5" in stage.prompts[1]
    assert len(episode.trajectories) == 1
    assert "tool" not in [m["role"] for m in [*ReAct().messages]]


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("Action: f()", [("f", "{}")], None),
        ('Thought: a\nAction: g({\n"x": "(1)"})\n', [("g", '{\n"x": "(1)"}')], "Thought: a"),
        ("Thought: use Action: f() later\nAnswer: 3", [], "3"),
        ("Answer: 3\nAction: f()", [], "3\nAction: f()"),
        ("just text", [], "just text"),
        ("", [], ""),
    ],
)
async def test_what_react_reads(text: str, calls: list[Any], content: str | None) -> None:
    action = ReAct()._action(text)
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in action.get("tool_calls") or []]
    assert (found, action["content"]) == (calls, content)


async def test_reflections_are_of_the_turn_and_one_conversation(template: ChatTemplate) -> None:
    stage = Stage(template, "6", "No. 5", "5")
    episode = await stage.whole(Calculator(SUM, retries=0), lambda tools: Reflect(tools, rounds=2, ask="Sure?"))
    assert episode.reward == 1.0
    assert places(episode) == [(0, 0, 1.0)]
    assert trained(episode) == [len(template.encode_text("6<|im_end|>No. 5<|im_end|>5<|im_end|>"))]


@tool
async def double(x: int) -> int:
    """Double a number."""
    return 2 * x


async def test_the_tool_loop_keeps_its_own_calls_to_itself(template: ChatTemplate) -> None:
    call = '<tool_call>\n{"name": "double", "arguments": {"x": 4}}\n</tool_call>'
    theirs = '<tool_call>\n{"name": "calc", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    stage = Stage(template, call, theirs, "5")
    episode = await stage.whole(Calculator(SUM), lambda tools: ToolLoop(tools, own=[double]))
    assert episode.reward == 1.0
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert "<tool_response>\n8\n" in stage.prompts[1]
    assert places(episode) == [(0, 0, 0.0), (1, 0, 1.0)]
    # It never asks for ever: the last call goes to the environment, which does not know it.
    stage = Stage(template, *[call] * 3, "5")
    episode = await stage.whole(Calculator(SUM), lambda tools: ToolLoop(tools, own=[double], most=3))
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == [
        "error: there is no tool 'double'; there are: calc"
    ]


def test_tools_of_the_loop_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from agentrl import tool\n\n@tool\ndef f(x: int) -> int:\n    'Say.'\n    return x\n\nplain = 3\n")
    assert [found.name for found in ToolLoop(paths=[f"{file}:f"]).own] == ["f"]
    with pytest.raises(ConfigError, match="put @tool on the function"):
        ToolLoop(paths=[f"{file}:plain"])
    with pytest.raises(ConfigError, match="the environment has tools named"):
        ToolLoop([double], own=[double])


async def test_compaction_starts_a_trajectory_and_is_credited_with_its_turn(template: ChatTemplate) -> None:
    stage = Stage(template, "2", "8", "It is 3 to 7.", "5")
    env = GuessNumber({"low": 1, "high": 9, "secret": 5})
    task = len((await env.reset())[0][0]["content"])
    episode = await stage.whole(env, lambda tools: Compact(tools, longest=task + 8, ask="Sum up."))
    assert episode.reward == 1.0
    assert "It is 3 to 7." in stage.prompts[3]
    assert "higher" not in stage.prompts[3]
    assert "lower" in stage.prompts[3]
    assert [(t.reason, t.abandoned) for t in episode.trajectories] == [
        (SplitReason.START, False),
        (SplitReason.EDITED, False),
    ]
    # Turn 2 has a mark in both: the summary and the answer after it; its reward stands on the last.
    assert places(episode) == [(0, 0, 0.0), (1, 0, 0.0), (2, 0, 0.0), (2, 1, 1.0)]
    said = ("2<|im_end|>8<|im_end|>It is 3 to 7.<|im_end|>", "5<|im_end|>")
    assert trained(episode) == [len(template.encode_text(text)) for text in said]


async def test_compaction_shows_what_tools_said_without_their_calls(template: ChatTemplate) -> None:
    call = '<tool_call>\n{"name": "calc", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    stage = Stage(template, call, "It says 5.", "5")
    episode = await stage.whole(Calculator(SUM), lambda tools: Compact(tools, longest=10, ask="Sum up."))
    assert episode.reward == 1.0
    assert "<tool_response>\n5\n</tool_response>" in stage.prompts[1]
    assert "<tool_response>" not in stage.prompts[2]
    assert "Tool: 5" in stage.prompts[2]


async def test_a_pair_has_two_contexts_and_one_reward(template: ChatTemplate) -> None:
    stage = Stage(template, "Say five.", "5")
    episode = await stage.whole(Calculator(SUM), Pair)
    assert [t.agent for t in episode.trajectories] == ["planner", "worker"]
    assert [(t.index, t.agent, t.reward) for t in episode.turns] == [(0, "planner", 0.0), (0, "worker", 1.0)]
    assert "Plan: Say five." in stage.prompts[1]
    assert "You plan" not in stage.prompts[1]


async def test_agents_in_turn_each_have_their_context_and_their_reward(template: ChatTemplate) -> None:
    stage = Stage(template, "22", "35", "30", "accept")
    episode = await stage.whole(Bargain({"cost": 20, "value": 40}), InTurn)
    assert [(t.agent, t.reward) for t in episode.turns] == [
        ("buyer", 0.0),
        ("seller", 0.0),
        ("buyer", pytest.approx(0.5)),
        ("seller", pytest.approx(0.5)),
    ]
    assert episode.reward == pytest.approx(1.0)
    assert [t.agent for t in episode.trajectories] == ["buyer", "seller"]
    assert "worth 40" not in stage.prompts[1] + stage.prompts[3]
    assert "worth 20" not in stage.prompts[2]


async def test_shares_must_add_up(template: ChatTemplate) -> None:
    class Wrong(Bargain):
        async def step(self, action: Any) -> Any:
            step = await super().step(action)
            return step._replace(info={"agent_rewards": {"buyer": 0.7}})

    outcome = await Stage(template, "22").play(Wrong({"cost": 20, "value": 40}), InTurn)
    assert outcome.episode.stop is Stop.ENV_ERROR
    assert "add up to 0.7, and the step's reward is 0.0" in (outcome.episode.error or "")


def test_names_of_agents_in_turn_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least two, all different"):
        InTurn(names=("a", "a"))
    with pytest.raises(ConfigError, match="instructions for"):
        InTurn(systems={"nobody": "x"})


# --- black boxes

ASK = """
import json, os, sys
from openai import OpenAI
row = json.loads(sys.stdin.readline())
client = OpenAI()   # both come from the environment
reply = client.chat.completions.create(model="any", messages=[{"role": "user", "content": row["ask"]}])
print("some noise")
print(json.dumps({"reward": 0.5, "answer": reply.choices[0].message.content}))
"""
NODE = """
const row = JSON.parse(require('fs').readFileSync(0));
const body = {model: 'any', messages: [{role: 'user', content: row.ask}]};
fetch(process.env.OPENAI_BASE_URL + '/chat/completions', {method: 'POST', body: JSON.stringify(body),
  headers: {'Content-Type': 'application/json', Authorization: 'Bearer ' + process.env.OPENAI_API_KEY}})
.then(r => r.json()).then(r => console.log(r.choices[0].message.content === 'yes' ? 1 : 0));
"""
ROW = {"ask": "ready?", "answer": "yes"}


async def test_a_black_box_in_this_process(template: ChatTemplate) -> None:
    async def run(row: Any, base_url: str, api_key: str) -> float:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(2):
                ask = [{"role": "user", "content": row["ask"]}]
                reply = await client.chat.completions.create(model="any", messages=ask)  # type: ignore[arg-type]
            return float(reply.choices[0].message.content == row["answer"])

    stage = Stage(template, "no", "yes")
    episode = await stage.whole(BlackBoxEnv(ROW), lambda tools: BlackBox(tools, run=run), served=True)
    assert episode.reward == 1.0
    assert {turn.index for turn in episode.turns} == {0}


def judge(answer: str, row: Any) -> float:
    return float(answer == row["answer"])


@pytest.mark.slow
async def test_a_black_box_of_another_process_judged_by_the_environment(template: ChatTemplate) -> None:
    stage = Stage(template, "yes")
    env = BlackBoxEnv(ROW, reward=f"{__file__}:judge")
    episode = await stage.whole(env, lambda tools: BlackBox(tools, command=[sys.executable, "-c", ASK]), served=True)
    assert episode.reward == 1.0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
async def test_a_black_box_in_another_language(template: ChatTemplate) -> None:
    stage = Stage(template, "yes")
    episode = await stage.whole(
        BlackBoxEnv(ROW), lambda tools: BlackBox(tools, command=["node", "-e", NODE]), served=True
    )
    assert episode.reward == 1.0


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import sys; sys.exit('no model')", "ended with code 1: no model"),
        ("print('well done')", "must be its reward"),
        ("print()", "must be its reward"),
    ],
)
async def test_a_black_box_that_breaks(template: ChatTemplate, program: str, says: str) -> None:
    make = lambda tools: BlackBox(tools, command=[sys.executable, "-c", program])  # noqa: E731
    outcome = await Stage(template).play(BlackBoxEnv(ROW), make, served=True)
    assert outcome.episode.stop is Stop.AGENT_ERROR
    assert says in (outcome.episode.error or "")


async def test_a_black_box_that_hangs_is_ended_with_all_that_it_started(template: ChatTemplate, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    program = f"sleep 600 & echo $! > {told}.new; mv {told}.new {told}; wait"
    make = lambda tools: BlackBox(tools, command=["sh", "-c", program])  # noqa: E731
    playing = asyncio.ensure_future(Stage(template).play(BlackBoxEnv(ROW), make, served=True))
    until = time.monotonic() + 60
    while not told.exists() and time.monotonic() < until:  # noqa: ASYNC110 - another process is waited for
        await asyncio.sleep(0.02)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    pid = int(told.read_text())
    while _runs(pid) and time.monotonic() < until:  # noqa: ASYNC110 - its parent reaps it
        await asyncio.sleep(0.02)
    assert not _runs(pid)


async def test_one_that_is_cancelled_while_it_starts_leaves_nothing() -> None:
    asleep = long_sleep()
    box = BlackBox(command=["sh", "-c", f"{' '.join(asleep)} & wait"])
    for rounds in range(8):
        starting = asyncio.ensure_future(box._command(ROW, "http://nowhere", "key"))
        for _ in range(rounds):
            await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 - the program gets further than the loop that starts it
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(starting, 60)
    await eventually(lambda: not running(*asleep))


async def test_one_whose_daemon_holds_its_output_does_not_hold_the_episode() -> None:
    asleep = long_sleep()
    box = BlackBox(command=["sh", "-c", f"setsid {' '.join(asleep)} & wait"])
    playing = asyncio.ensure_future(box._command(ROW, "http://nowhere", "key"))
    await eventually(lambda: bool(running(*asleep)))
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(playing, 60)
    for daemon in running(*asleep):
        os.kill(int(daemon.name), signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_no_reward_is_no_verdict(template: ChatTemplate) -> None:
    outcome = await Stage(template).play(
        BlackBoxEnv(ROW), lambda tools: BlackBox(tools, run=lambda row, url, key: None), served=True
    )
    assert outcome.episode.stop is Stop.NO_VERDICT


def test_a_black_box_is_a_function_or_a_program() -> None:
    for given in ({}, {"run": print, "command": ["x"]}, {"run": print, "cwd": "x"}, {"run": "math:pi"}):
        with pytest.raises(ConfigError):
            BlackBox(**given)


@pytest.mark.parametrize("said", ["no JSON", "9" * 5000, "[" * 100_000, "[1]", "null", '"text"'])
async def test_what_is_no_reward_is_no_verdict_or_judged(said: str) -> None:
    env = BlackBoxEnv(ROW)
    await env.reset()
    assert (await env.step({"role": "assistant", "content": said}))[1:3] == (None, True)
    judged = BlackBoxEnv(ROW, reward=f"{__file__}:judge")
    await judged.reset()
    assert (await judged.step({"role": "assistant", "content": said})).reward == 0.0
