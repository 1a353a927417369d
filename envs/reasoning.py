r"""Every family of reasoning-gym's procedural problems, scored by its own rules, in worker processes with a deadline.

    user       … What is the next number? Put your final answer between <answer> and </answer>.
    assistant  Each is twice the last. <answer>32</answer>                         1.0

A row is `{"family", "seed", "index", "config"}`: the problem is made from it, so it needs no data file. `rows` gives
all families in turn; for some of them, subclass:

```python
class Sums(ReasoningGym):
    families = ("chain_sum", "gcd")
    config = {"chain_sum": {"max_terms": 3}}
```
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import pickle
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from agentrl.env import Env
from agentrl.errors import ConfigError, ContractError, DeadlineExceeded
from agentrl.reward.workers import CallFailed, shared_pool
from agentrl.types import Info, Message, Row, Step

INSTRUCTION = "Put your final answer between <answer> and </answer>."
SIZES = {"train": 20_000, "eval": 256}
APART = 1_000_003
"""Between the seeds of two data sets: problem i of one is drawn from its seed + i."""


class ReasoningGym(Env):
    """Answered once. The reward is the family's own score; some give a little for a part of the way."""

    reward_range = (0.0, 1.0)
    families: ClassVar[tuple[str, ...]] = ()
    """Which; all that need no further settings where none is named."""
    config: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings by family."""

    def __init__(self, row: Row, *, instruction: str = INSTRUCTION, seconds: float = 10.0) -> None:
        super().__init__(row)
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("reasoning-gym's problems need its package: pip install 'agentrl[envs]'")
        self.instruction, self.seconds = instruction, seconds
        self.place = [row["family"], dict(row.get("config") or {}), row["seed"], row["index"]]
        self.answer: str | None = None
        self._entry = ""
        self.over = True

    @classmethod
    def rows(cls, split: str, seed: int) -> Iterator[Row]:
        """The families in turn. The splits have seeds of their own; small families may repeat a problem by chance."""
        if split not in SIZES:
            raise ContractError(f"{cls.__name__} has no split {split!r}, only {sorted(SIZES)}")
        names = cls.families or all_families()
        for number in range(SIZES[split]):
            family = names[number % len(names)]
            row = {"family": family, "seed": 2 * seed + (split == "eval"), "index": number // len(names)}
            yield {**row, "config": dict(cls.config.get(family, {}))}

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The problem that the row names; nothing else is random."""
        # A minute and more, because some families search for a problem that has a solution.
        found = await shared_pool().acall("agentrl.envs.reasoning:problem", *self.place, seconds=120.0, by_cpu=True)
        self.answer, self._entry, self.over = found["answer"], found["entry"], False
        return [{"role": "user", "content": f"{found['question']}\n{self.instruction}".strip()}], {}

    async def step(self, action: Message) -> Step:
        """Score the answer."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        self.over = True
        text = action.get("content") or ""
        _, tag, rest = text.rpartition("<answer>")
        answer = rest.partition("</answer>")[0].strip() if tag else ""
        if not answer:
            return Step([], 0.0, True, False, {"reason": "no answer"})
        try:
            reward = await shared_pool().acall(
                "agentrl.envs.reasoning:score", *self.place, self._entry, answer, seconds=self.seconds, by_cpu=True
            )
        except (CallFailed, DeadlineExceeded) as error:
            # What the family's own rules cannot read, or not in time, is no right answer.
            return Step([], 0.0, True, False, {"reason": str(error)})
        return Step([], reward, True, False, {"reason": "scored"})

    def oracle(self, messages: list[Message]) -> str | None:
        """The family's example of an answer; some have none."""
        return None if self.answer is None else f"<answer>{self.answer}</answer>"


def all_families() -> tuple[str, ...]:
    """Their names, but for `composite`, which is a mixture of others."""
    # Two seconds of import that only those who ask pay.
    from reasoning_gym.factory import DATASETS

    return tuple(sorted(set(DATASETS) - {"composite"}))


def problem(family: str, config: dict[str, Any], seed: int, index: int) -> dict[str, Any]:
    """The question, the answer as text or None, and all of it for `score`. Runs in a worker."""
    import numpy as np

    # Some families draw from the process's generators: seeded here, they too give a problem twice.
    random.seed(f"{family} {seed} {index}")
    np.random.seed((APART * seed + index) % 2**32)
    entry = _data(family, json.dumps(config, sort_keys=True), seed, index)[index]
    # Pickled and not JSON, which would make lists of the tuples that some scores compare.
    whole = base64.b64encode(pickle.dumps(entry)).decode()
    return {"question": entry["question"], "answer": entry["answer"], "entry": whole}


def score(family: str, config: dict[str, Any], seed: int, index: int, entry: str, answer: str) -> float:
    """The family's score of an answer to what `problem` gave. Runs in a worker."""
    data = _data(family, json.dumps(config, sort_keys=True), seed, index)
    return min(1.0, max(0.0, float(data.score_answer(answer, pickle.loads(base64.b64decode(entry))))))


def _data(family: str, config: str, seed: int, index: int) -> Any:
    # Some families make all their problems at once, or refuse to promise many: as few as will do.
    return _data_of(family, config, seed, 256 * (index // 256 + 1))


@functools.lru_cache(maxsize=64)
def _data_of(family: str, config: str, seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(family, seed=APART * seed % 2**31, size=size, **json.loads(config))
