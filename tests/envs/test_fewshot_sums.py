"""Few-shot sums: the examples are right, the splits share nothing, the answer is the first line alone."""

from __future__ import annotations

import itertools

import pytest

from agentrl.envs.fewshot_sums import FewshotSums
from agentrl.errors import ContractError

ROW = {"a": 35, "b": 48, "shots": [[41, 27], [2, 3]]}


async def test_the_examples_stand_before_the_question() -> None:
    messages, _ = await FewshotSums(ROW).reset(seed=1)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in messages] == [
        "",
        "41 + 27",
        "41 + 27 = 68",
        "2 + 3",
        "2 + 3 = 5",
        "35 + 48",
    ]


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("35 + 48 = 83", 1.0),
        (" 35 + 48 = 83 \n2 + 2 = 4", 1.0),
        ("35 + 48 = 84", 0.0),
        ("83", 0.0),
        ("35 + 48 = 838", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
async def test_the_first_line_is_the_answer(said: str | None, reward: float) -> None:
    env = FewshotSums(ROW)
    await env.reset(seed=1)
    step = await env.step({"role": "assistant", "content": said})
    assert (step.reward, step.terminated) == (reward, True)
    with pytest.raises(ContractError, match="call reset first"):
        await env.step({"role": "assistant", "content": "35 + 48 = 83"})


def test_the_splits_share_no_sum_whatever_the_seeds() -> None:
    def sums(split: str, seed: int) -> set[frozenset[int]]:
        return {frozenset((row["a"], row["b"])) for row in itertools.islice(FewshotSums.rows(split, seed), 256)}

    assert not (sums("train", 0) | sums("train", 1)) & (sums("eval", 0) | sums("eval", 2))
    assert list(FewshotSums.rows("eval", 3)) == list(FewshotSums.rows("eval", 3))
    with pytest.raises(ContractError, match="no split 'test'"):
        next(FewshotSums.rows("test", 0))
