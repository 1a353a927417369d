"""The environment contract: Gymnasium's `reset` and `step`, asynchronous, with chat messages in and out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.errors import ContractError
from agentrl.types import Info, Message, Row, Step

if TYPE_CHECKING:
    from agentrl.tool import Tool


class Env:
    """One episode of a task. A fresh instance is made from a data row for every episode.

    ```python
    class GuessNumber(Env):
        async def reset(self, *, seed=None, options=None):
            self.over = False
            return [{"role": "user", "content": "Guess my number, 1 to 9."}], {}

        async def step(self, action):
            if self.over:
                raise ContractError("the episode is over; call reset first")
            guess, secret = (action.get("content") or "").strip(), str(self.row["secret"])
            self.over = guess == secret
            if self.over:
                return Step([], 1.0, True, False, {})
            hint = "higher" if guess < secret else "lower"
            return Step([{"role": "user", "content": hint}], 0.0, False, False, {})
    ```

    Write `async def` or plain `def`: plain methods run in a thread, one for the episode, and may block; coroutines run
    in the event loop that all episodes share, and must not. `row` is the data row, a copy of its own for each instance;
    keyword arguments come from `[env.args]` of the run's TOML. All randomness must come from `reset`'s seed: the
    episodes of a group are given the same seed and must start identically.
    """

    tools: Sequence[Tool] = ()
    """What the agent may call; `step` receives the calls in `action["tool_calls"]` and runs them."""

    reward_range: tuple[float, float] | None = None
    """The least and the most that a whole episode can earn, where that is known: `agentrl check` holds it against what
    episodes earn, and expects the oracle to earn the most."""

    _generator: random.Random | None = None

    def __init__(self, row: Row) -> None:
        self.row = row

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterable[Row]:
        """The rows of a procedural environment (`split` is "train" or "eval"); a data file replaces this."""
        raise ContractError(f"{cls.__name__} makes no rows of its own: give [data] a file, or define `rows`")

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start the episode; returns the first messages and an info dict."""
        raise NotImplementedError

    async def step(self, action: Message) -> Step:
        """Take the assistant's message; returns only the messages that are new, and what the action earned."""
        raise NotImplementedError

    def oracle(self, messages: list[Message]) -> Message | str | None:
        """The best next answer to the conversation so far, for `agentrl check` and `agentrl play --oracle`.

        A text or a whole assistant message; None where it is not known. It may read the row and the episode's state.
        """
        return None

    def generator(self, seed: int | None) -> random.Random:
        """The episode's random numbers: anew from `seed`; where that is None, the last ones go on (Gymnasium's rule).

        ```python
        async def reset(self, *, seed=None, options=None):
            self.secret = self.generator(seed).randint(1, 9)
        ```
        """
        if seed is not None or self._generator is None:
            self._generator = random.Random(seed)
        return self._generator

    async def close(self) -> None:
        """Release what the episode holds. Called exactly once, also after a failure."""
