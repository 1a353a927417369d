"""What every environment of the shelf promises: sample rows, an oracle that earns the most, an end that is one."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl.data import load_rows
from agentrl.env import Env
from agentrl.envs.bargain import Bargain
from agentrl.envs.guess_number import GuessNumber
from agentrl.envs.search import Search, load_corpus
from agentrl.envs.shop import SERVER, Shop
from agentrl.errors import ConfigError, ContractError, DataError
from agentrl.mcp import shared_client
from agentrl.types import Message

CLASSES: dict[str, type[Env]] = {
    "guess_number": GuessNumber,
    "bargain": Bargain,
    "search": Search,
    "shop": Shop,
}
ENVS = [name if name != "shop" else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES]


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def play_oracle(env: Env, seed: int = 1) -> float:
    messages, _ = await env.reset(seed=seed)
    total = 0.0
    for _ in range(20):
        said = env.oracle(messages)
        assert said is not None
        action = says(said) if isinstance(said, str) else said
        step = await env.step(action)
        messages = [*messages, action, *step.observation]
        total += step.reward or 0.0
        if step.terminated:
            with pytest.raises(ContractError, match="call reset first"):
                await env.step(action)
            return total
    raise AssertionError(f"it did not end: {messages}")


@pytest.mark.parametrize("name", ENVS)
async def test_the_oracle_earns_the_most_on_the_sample_rows(name: str) -> None:
    async with AsyncExitStack() as held:
        if name == "shop":
            await held.enter_async_context(shared_client(SERVER))  # so that it starts once
        for row in load_rows(f"sample:{name}", limit=4):
            env = CLASSES[name](row)
            held.push_async_callback(env.close)
            assert await play_oracle(env) == pytest.approx(1.0)
            assert await play_oracle(env) == pytest.approx(1.0), "a second episode differs from the first"


@pytest.mark.parametrize("name", list(CLASSES))
def test_rows_are_reproducible_and_the_splits_share_nothing(name: str) -> None:
    def rows(split: str, seed: int) -> list[Any]:
        return [repr(row) for row in itertools.islice(CLASSES[name].rows(split, seed), 200)]

    assert rows("train", 3) == rows("train", 3)
    assert set(rows("train", 3)).isdisjoint(rows("eval", 4))
    with pytest.raises(ContractError, match="has no split 'test', only"):
        next(iter(CLASSES[name].rows("test", 0)))


def test_an_unknown_sample_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="there are: bargain, calculator"):
        load_rows("sample:nosuch")


async def test_guesses_are_told_and_counted() -> None:
    env = GuessNumber({"low": 1, "high": 9, "secret": 7}, guesses=3, cost=0.25)
    messages, _ = await env.reset(seed=1)
    assert messages[0]["content"].endswith("you have 3 guesses.")
    told = [(await env.step(says(text))).observation[0]["content"] for text in ("five", "9")]
    assert told == ["that is no number", "lower"]
    assert (await env.step(says(" 7 ")))[1:4] == (0.5, True, False)
    await env.reset(seed=1)
    assert [(await env.step(says("1")))[1:3] for _ in range(3)] == [(0.0, False), (0.0, False), (0.0, True)]


async def test_a_bargain_is_two_agents_and_each_has_its_own_part() -> None:
    env = Bargain({"cost": 20, "value": 40})
    messages, _ = await env.reset()
    assert messages == [{"role": "user", "content": "You buy. It is worth 40 to you. Say a price, or accept."}]
    step = await env.step(says("25"))
    told = "You sell. It is worth 20 to you. The buyer says 25. Say a price, or accept."
    assert step.observation == [{"role": "user", "content": told}]
    step = await env.step(says("accept"))
    assert step.reward == 1.0
    assert step.info["agent_rewards"] == {"buyer": 0.75, "seller": 0.25}


@pytest.mark.parametrize("said", [("accept", "hm") * 3, ("99", "accept"), ("10", "accept"), ("30",) * 6])
async def test_no_deal_and_a_deal_at_a_loss_earn_nothing(said: tuple[str, ...]) -> None:
    env = Bargain({"cost": 20, "value": 40})
    await env.reset()
    steps = [await env.step(says(text)) for text in said]
    assert [step.terminated for step in steps] == [False] * (len(said) - 1) + [True]
    assert steps[-1].reward == 0.0
    assert steps[-1].info["agent_rewards"] == {"buyer": 0.0, "seller": 0.0}


async def test_search_finds_reads_and_does_not_choke_on_its_own_syntax(tmp_path: Path) -> None:
    row = load_rows("sample:search", limit=3)[2]
    founder = row["question"].split(" that ")[1].removesuffix(" founded?")
    env = Search(row)
    await env.reset()
    found = await env.search(words=f"{founder} founded")
    texts = [await env.read(title=line.partition(":")[0]) for line in found.splitlines()]
    assert len(texts) == 3
    assert any(founder in text and f"river {row['answer']}" in text for text in texts)
    assert await env.search(words='title:"x" AND (NEAR * ^ "') != ""
    assert await env.search(words="…") == "nothing found"
    assert await env.read(title="Nowhere") == "there is no document 'Nowhere'"
    assert (await env.step(says(f"The {row['answer'].upper()}!"))).reward == 1.0
    (tmp_path / "bad.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(DataError, match="a line is"):
        load_corpus(str(tmp_path / "bad.jsonl"))


@pytest.mark.slow
async def test_the_shop_counts_what_was_paid_and_nothing_that_was_said() -> None:
    row = {"stock": {"red pen": 3, "blue pen": 2, "tin cup": 5}, "wanted": {"pen": 2, "cup": 1}}
    env, other = Shop(row), Shop(row)
    try:
        await env.reset(seed=1)
        await other.reset(seed=1)
        find, order, pay = env.tools
        assert await find(kind="pen") == "red pen: 3 coins, blue pen: 2 coins"
        assert sorted(order.schema["function"]["parameters"]["properties"]) == ["article", "count"]
        assert (await order(article="gold pen", count=1)).endswith("there is no article 'gold pen'")
        assert (await pay()).endswith("the basket is empty")
        await order(article="blue pen", count=2)
        await pay()
        await order(article="tin cup", count=1)
        step = await env.step(says("I have paid for everything."))
        assert (step.reward, step.terminated, step.info["paid"]) == (0.25, True, {"blue pen": 2})
        assert (await other.step(says("done"))).reward == 0.0
    finally:
        await env.close()
        await other.close()
