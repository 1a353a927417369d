"""Several environments in one run: `[[env]]`, each with its rows, its weight and its own figures."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agentrl.conductor.check import plan_run
from agentrl.conductor.config import RunConfig
from agentrl.config import load, to_toml
from agentrl.data import env_of
from agentrl.envs.guess_number import GuessNumber
from agentrl.errors import ConfigError
from agentrl.rollout.session import AgentByRow, agent_of
from tests.conductor.kit import RUN, finished, lines, make_place, start

MIXED = """
name = "mixed"
model = "model"
[[env]]
path = "agentrl.envs.guess_number:GuessNumber"
args = {guesses = 2}
weight = 3
data = {train_limit = 30}
[[env]]
name = "haggle"
path = "agentrl.envs.bargain:Bargain"
data = {train = "prices.jsonl", eval = "prices.jsonl", columns = {low = "cost", high = "value"}}
[agent]
path = "agentrl.agents.in_turn:InTurn"
[eval]
rows = 4
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prices.jsonl").write_text('{"low": 3, "high": 9}\n' * 6)
    (tmp_path / "run.toml").write_text(MIXED)
    return tmp_path


def test_rows_of_each_go_to_each(place: Path) -> None:
    config = load(RunConfig, place / "run.toml")
    plan = plan_run(config, 0)
    names = [env_of(row, "?") for row in plan.train_rows]
    assert (names.count("GuessNumber"), names.count("haggle")) == (30, 10)
    assert [env_of(row, "?") for row in plan.eval_rows] == ["GuessNumber"] * 4 + ["haggle"] * 4
    first = plan.make_env(plan.train_rows[0])
    assert isinstance(first, GuessNumber)
    assert first.guesses == 2
    assert "_env" not in first.row
    assert plan.make_env(plan.eval_rows[-1]).row == {"cost": 3, "value": 9}
    # What a run keeps of its config can be read again.
    (place / "kept.toml").write_text(to_toml(config))
    assert load(RunConfig, place / "kept.toml") == config
    assert tomllib.loads((place / "kept.toml").read_text())["env"]["path"].endswith("agentrl.envs.bargain:Bargain")


OWN = """
from agentrl.agent import Agent

class Terse(Agent):
    def __init__(self, tools=(), *, limit=8):
        super().__init__(tools)
        self.limit = limit
"""


def test_a_part_may_have_an_agent_of_its_own(place: Path) -> None:
    (place / "terse.py").write_text(OWN)
    own = 'args = {guesses = 2}\nagent = {path = "terse.py:Terse", args = {limit = 3}}'
    (place / "run.toml").write_text(MIXED.replace("args = {guesses = 2}", own))
    config = load(RunConfig, place / "run.toml")
    plan = plan_run(config, 0)
    assert isinstance(plan.make_agent, AgentByRow)
    made = [agent_of(plan.make_agent, row)([]) for row in (plan.eval_rows[0], plan.eval_rows[-1])]
    assert [type(agent).__name__ for agent in made] == ["Terse", "InTurn"]
    assert made[0].limit == 3  # type: ignore[attr-defined]
    (place / "kept.toml").write_text(to_toml(config))
    assert load(RunConfig, place / "kept.toml") == config

    (place / "run.toml").write_text(MIXED.replace("args = {guesses = 2}", own.replace("limit", "limti")))
    misspelt = load(RunConfig, place / "run.toml")
    with pytest.raises(ConfigError, match="limti"):
        plan_run(misspelt, 0)
    other = 'name = "haggle"\nagent = {path = "terse.py:Terse"}'
    both = MIXED.replace("args = {guesses = 2}", own).replace('name = "haggle"', other)
    (place / "run.toml").write_text(both)
    with pytest.raises(ConfigError, match=r"\[agent\] has no effect where each \[\[env\]\] has an agent"):
        load(RunConfig, place / "run.toml")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ('name = "haggle"\npath = "agentrl.envs.bargain:Bargain"', 'path = "x:GuessNumber"'),
            "give each [[env]] a name",
        ),
        (("[agent]", '[data]\ntrain = "x.jsonl"\n[agent]'), "each has its own"),
        (("weight = 3", "weight = 0"), "greater than 0"),
        (("weight = 3", "wieght = 3"), "unknown key"),
        (("prices.jsonl", "nosuch.jsonl"), "nosuch.jsonl"),
        (("guesses = 2", "gueses = 2"), "gueses"),
    ],
)
def test_what_cannot_be_mixed_is_told(place: Path, change: tuple[str, str], says: str) -> None:
    text = (place / "run.toml").read_text()
    assert change[0] in text
    (place / "run.toml").write_text(text.replace(*change))
    with pytest.raises(ConfigError) as told:
        plan_run(load(RunConfig, place / "run.toml"), 0)
    assert says in str(told.value)


CUT = """
from agentrl.agent import Agent

class Cut(Agent):
    async def act(self, observation, client):
        self.messages += observation
        reply = await client.chat.completions.create(model="policy", messages=self.messages, max_tokens=4)
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return self.messages[-1]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mixed_run_has_figures_of_each(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    part = '[[env]]\npath = "env.py:Bright"\nname = "{}"\nweight = {}\n'
    two = part.format("two", 2) + 'agent = {path = "terse.py:Cut"}\n'
    text = RUN.replace('[env]\npath = "env.py:Bright"\n', part.format("one", 1) + two)
    assert "[[env]]" in text
    (place / "terse.py").write_text(CUT)
    (place / "run.toml").write_text(text)
    code, said = finished(start(place, "train", "run.toml", "train.steps=10"), seconds=400)
    assert code == 0, said
    run = place / "runs/r"
    seen = {name for line in lines(run, "step") for name in line.get("envs", {})}
    assert seen == {"one", "two"}, "of ten groups that live some are of either, and are trained sooner or later"
    lengths = [line["envs"]["two"]["length"] for line in lines(run, "step") if "two" in line.get("envs", {})]
    assert max(lengths) <= 8, "two turns of four tokens: it is played by the agent of its own"
    assert max(line["envs"]["one"]["length"] for line in lines(run, "step") if "one" in line.get("envs", {})) > 8
    first, *_ = lines(run, "eval")
    assert {name: figures["eval_scored"] for name, figures in first["envs"].items()} == {"one": 3.0, "two": 3.0}
