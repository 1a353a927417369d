"""Verdicts are finite numbers or openly absent."""

from __future__ import annotations

import pytest

from agentrl.errors import ContractError
from agentrl.reward.score import Score, score


async def test_plain_async_and_scored_rewards_are_one() -> None:
    async def later(answer: str) -> float:
        return float(answer)

    assert await score(lambda answer, gold: answer == gold, "4", gold="4") == Score(1.0)
    assert await score(later, "0.5") == Score(0.5)
    assert await score(lambda: Score(None, {"format": 1.0})) == Score(None, {"format": 1.0})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1", None, [1.0]])
async def test_anything_else_breaks_the_contract(bad: object) -> None:
    with pytest.raises(ContractError, match="expected a finite number"):
        await score(lambda: bad)  # type: ignore[arg-type,return-value]


def test_parts_are_checked_too() -> None:
    with pytest.raises(ContractError, match="reward part 'style' is nan"):
        Score(1.0, {"style": float("nan")})
