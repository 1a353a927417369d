"""reasoning-gym's families: rows without a data file, problems made twice alike, scores by their own rules."""

from __future__ import annotations

import itertools
import json

import pytest

from agentrl.envs.reasoning import ReasoningGym, all_families
from agentrl.errors import ContractError
from agentrl.types import Message, Row


class Sums(ReasoningGym):
    families = ("chain_sum", "gcd")
    config = {"chain_sum": {"min_terms": 2, "max_terms": 2}}  # noqa: RUF012 (as the page shows it)


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_rows_name_problems() -> None:
    train = list(itertools.islice(Sums.rows("train", 3), 4))
    assert [row["family"] for row in train] == ["chain_sum", "gcd", "chain_sum", "gcd"]
    assert [row["index"] for row in train] == [0, 0, 1, 1]
    assert train[0]["config"] == {"min_terms": 2, "max_terms": 2}
    assert json.loads(json.dumps(train)) == train
    held_out = list(itertools.islice(Sums.rows("eval", 3), 4))
    assert not [row for row in held_out if row in train]
    with pytest.raises(ContractError, match="no split 'test'"):
        next(Sums.rows("test", 0))


@pytest.mark.slow
async def test_a_problem_and_its_answers() -> None:
    row: Row = next(iter(Sums.rows("train", 0)))
    for answer, reward, reason in [
        ("<answer>{}</answer>", 1.0, "scored"),
        ("first <answer>0</answer>, no: <answer> {} </answer>.", 1.0, "scored"),
        ("<answer>-5</answer>", 0.0, "scored"),
        ("{}", 0.0, "no answer"),
        ("<answer></answer>", 0.0, "no answer"),
        ("", 0.0, "no answer"),
    ]:
        env = Sums(row)
        messages, _ = await env.reset(seed=1)
        assert messages[0]["content"].endswith("between <answer> and </answer>.")
        step = await env.step(says(answer.replace("{}", env.answer or "")))
        assert (step.reward if reward else round(step.reward or 0.0, 1), step.info["reason"]) == (reward, reason)
        with pytest.raises(ContractError, match="call reset first"):
            await env.step(says("again"))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_every_family_asks_twice_alike_and_scores() -> None:
    families = all_families()
    assert len(families) >= 100
    for family in families:
        row = {"family": family, "seed": 4, "index": 3}
        first, second = ReasoningGym(row), ReasoningGym(row, seconds=60.0)
        asked, _ = await first.reset(seed=1)
        again, _ = await second.reset(seed=2)
        assert asked == again, family
        right = second.oracle([])
        if right is not None:
            assert (await second.step(says(right))).reward == 1.0, family
        step = await first.step(says("<answer>((( 7 \n x</answer>"))
        assert step.reward is not None, family
        assert 0.0 <= step.reward <= 1.0, family
