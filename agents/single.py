"""One question, one answer: every observation is asked on its own, without what came before.

For environments of one turn, and as a bound: what a policy earns that remembers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.agent import Agent, ChatClient
from agentrl.tool import Tool
from agentrl.types import Message


class Single(Agent):
    """`system` goes before each observation; `settings` with each call, `max_tokens` for one."""

    def __init__(
        self, tools: Sequence[Tool] = (), *, system: str | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        super().__init__(tools)
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.settings = settings or {}

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """Ask once. Answers of tools have nothing to belong to here, so they are shown as a user's words."""
        words = [{**m, "role": "user"} if m["role"] == "tool" else m for m in observation]
        shown = [{k: v for k, v in message.items() if k != "tool_call_id"} for message in words]
        tools: dict[str, Any] = {"tools": [tool.schema for tool in self.tools]} if self.tools else {}
        reply = await client.chat.completions.create(
            model="policy", messages=[*self.system, *shown], **tools, **self.settings
        )
        answer: Message = reply.choices[0].message.model_dump(exclude_none=True)
        return answer
