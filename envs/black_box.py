"""The other half of `agentrl.agents.black_box`: hands out the row, takes what the agent says that it earned.

A row is whatever the black box needs. With `reward`, the dotted path of a function `(answer, row)`, the environment
judges the `answer` that the black box gives instead of believing its own reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.reward.compose import Composed, shared
from agentrl.types import Info, Message, Row, Step


class BlackBox(Env):
    """`reward` is a dotted path, or a table of parts as in docs/rewards.md; None: the black box's word counts."""

    def __init__(self, row: Row, *, reward: str | Mapping[str, Any] | None = None) -> None:
        super().__init__(row)
        table = {"reward": {"path": reward}} if isinstance(reward, str) else reward
        self.reward: Composed | None = shared(table) if table else None
        self.over = True

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The row, as JSON; nothing is random."""
        self.over = False
        return [{"role": "user", "content": json.dumps(dict(self.row), ensure_ascii=False)}], {}

    async def step(self, action: Message) -> Step:
        """Take `{"reward", "answer"}`; no reward at all is no verdict."""
        if self.over:
            raise ContractError("the episode is over; call reset first")
        self.over = True
        try:
            said = json.loads(action.get("content") or "")
        except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, brackets without end
            said = None
        if not isinstance(said, dict):
            said = {"answer": action.get("content") or ""}
        if self.reward is not None:
            found = await self.reward(str(said.get("answer") or ""), self.row)
            return Step([], found.value, True, False, {"reward_parts": dict(found.parts), **found.info})
        reward = said.get("reward")
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise ContractError(f"the black box said that it earned {reward!r}, which is no number")
        return Step([], reward, True, False, {})
