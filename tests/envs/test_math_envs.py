"""The mathematics shelf: right, wrong, missing and unjudgeable answers; rows that can be solved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from agentrl.env import Env
from agentrl.envs.countdown import Countdown, evaluate
from agentrl.envs.math_feedback import MathFeedback
from agentrl.envs.math_single import MathSingle
from agentrl.errors import ContractError
from agentrl.reward.math import verify
from agentrl.types import Step

ROW = {"question": "What is 3/8 as a decimal?", "answer": "0.375"}


async def play(env: Env, *answers: str) -> list[Step]:
    await env.reset(seed=1)
    return [await env.step({"role": "assistant", "content": answer}) for answer in answers]


async def test_math_single() -> None:
    messages, _ = await MathSingle(ROW).reset(seed=1)
    assert messages[0]["content"] == "What is 3/8 as a decimal?\nEnd with your answer in \\boxed{}."
    for answer, reward, reason in [
        ("\\boxed{\\frac38}", 1.0, "equal"), ("\\boxed{0.38}", 0.0, "different"), ("0.375", 0.0, "no_answer"),
    ]:  # fmt: skip
        (step,) = await play(MathSingle(ROW), answer)
        assert (step.reward, step.terminated, step.info["math_reason"]) == (reward, True, reason)
    (step,) = await play(MathSingle({**ROW, "answer": "see \\includegraphics{x}"}), "\\boxed{1}")
    assert step.reward is None
    env = MathSingle(ROW)
    await play(env, "")
    with pytest.raises(ContractError, match="the episode is over"):
        await env.step({"role": "assistant", "content": ""})


async def test_math_single_with_rewards_of_its_own() -> None:
    rewards: dict[str, Any] = {
        "correct": {"path": "agentrl.reward.math:MathReward", "args": {"marker": "last_number"}},
        "again": {"path": "agentrl.reward.math:MathReward", "weight": 0.5},
    }
    (step,) = await play(MathSingle(ROW, rewards=rewards), "it is 0.375.")
    assert step.reward == 1.0
    assert step.info["reward_parts"] == {"correct": 1.0, "correct/answered": 1.0, "again": 0.0, "again/answered": 0.0}


async def test_math_feedback_tells_and_discounts() -> None:
    steps = await play(MathFeedback(ROW), "0.375", "\\boxed{0.4}", "\\boxed{3/8}")
    assert [step.reward for step in steps] == [0.0, 0.0, pytest.approx(0.49)]
    assert "There is no \\boxed{}" in steps[0].observation[0]["content"]
    assert "0.4 is not right" in steps[1].observation[0]["content"]
    steps = await play(MathFeedback(ROW, tries=2), "\\boxed{1}", "\\boxed{2}")
    assert [(step.reward, step.terminated) for step in steps] == [(0.0, False), (0.0, True)]
    (step,) = await play(MathFeedback({**ROW, "answer": "\\frac{1}{"}), "\\boxed{1}")
    assert (step.reward, step.terminated) == (None, True)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("\\boxed{7 * 3 + 5}", 1.0),
        ("\\boxed{7 \\times 3 + 5 = 26}", 1.0),
        ("\\boxed{5+(3*7)}", 1.0),
        ("\\boxed{7+3+5}", 0.1),
        ("\\boxed{26}", 0.0),
        ("\\boxed{7*3+5+0}", 0.0),
        ("7*3+5", 0.0),
        ("\\boxed{7**3}", 0.0),
        ("\\boxed{7/(3-3)+5}", 0.0),
        ("\\boxed{__import__('os')}", 0.0),
        ("\\boxed{" + "(" * 90 + "7", 0.0),
        ("", 0.0),
        ("\\boxed{True + 3}", 0.0),
    ],
)
async def test_countdown(answer: str, reward: float) -> None:
    (step,) = await play(Countdown({"numbers": [3, 5, 7], "target": 26}), answer)
    assert (step.reward, step.terminated) == (reward, True)


def test_rows_are_deterministic_and_apart() -> None:
    for kind in (MathSingle, MathFeedback, Countdown):
        train, again = (list(itertools.islice(kind.rows("train", 5), 40)) for _ in range(2))
        held_out = list(itertools.islice(kind.rows("eval", 5), 40))
        assert train == again != list(itertools.islice(kind.rows("train", 6), 40))
        assert not {repr(row) for row in train} & {repr(row) for row in held_out}
        with pytest.raises(ContractError, match="no split 'test'"):
            next(iter(kind.rows("test", 0)))


def test_every_row_of_math_single_can_be_answered() -> None:
    for row in itertools.islice(MathSingle.rows("train", 1), 60):
        assert verify(f"\\boxed{{{row['answer']}}}", row["answer"]).correct is True, row


async def test_the_oracle_of_countdown_finds_a_way() -> None:
    for row in itertools.islice(Countdown.rows("eval", 3), 20):
        for whole in (False, True):
            env = Countdown(row, whole=whole)
            (step,) = await play(env, env.oracle([]) or "")
            assert step.reward == 1.0, row
    assert Countdown({"numbers": [1, 1, 1], "target": 100}).oracle([]) is None


def test_countdown_rows_have_a_solution() -> None:
    for row in itertools.islice(Countdown.rows("train", 2), 25):
        found = any(
            _reaches(
                " ".join(itertools.chain(*zip(map(str, order), (*signs, ""), strict=True))), row["target"], len(order)
            )
            for order in itertools.permutations(row["numbers"])
            for signs in itertools.product("+-*/", repeat=len(order) - 1)
        )
        assert found, row


def _reaches(flat: str, target: int, count: int) -> bool:
    # Left to right, as the generator makes them.
    first, *rest = flat.split()
    text = "(" * (count - 2) + first
    for number, (sign, value) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
        text += f" {sign} {value}" + (")" if number < count - 2 else "")
    try:
        return evaluate(text)[0] == target
    except ValueError:
        return False
