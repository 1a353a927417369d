"""What a reward function gives back, and the check that it did."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ContractError


@dataclass(frozen=True, slots=True)
class Score:
    """A verdict. `value` None is "no verdict": the episode enters no baseline and no gradient; it is never a zero.

    `parts` are logged by name; `info` is kept with the episode.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.value is not None:
            _check("reward", self.value)
        for name, part in self.parts.items():
            _check(f"reward part {name!r}", part)


Reward = Callable[..., float | Score | Awaitable[float | Score]]
"""A reward function, plain or async: `def f(answer: str, row: Row) -> float | Score`."""


async def score(reward: Reward, *args: Any, **kwargs: Any) -> Score:
    """Call a reward function and return its verdict; ContractError where it gave back no finite number."""
    result = reward(*args, **kwargs)
    if inspect.isawaitable(result):
        result = await result
    return result if isinstance(result, Score) else Score(_check(f"reward of {reward!r}", result))


def _check(what: str, value: object) -> float:
    # bool is an int: `return answer == gold` is the commonest reward of all.
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ContractError(
            f"{what} is {value!r} ({type(value).__name__}), expected a finite number; "
            "return Score(None) where there is no verdict"
        )
    return float(value)
