"""Reflects and tries again: before an answer goes out, the same model reads it, says what is wrong, and mends it.

    assistant  (draft)  17
    user                Is that right? …
    assistant  (again)  I added wrongly. 18          → the action

All of it is one conversation and one turn, so the reflections are trained by what the action earned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.agent import Agent, ChatClient
from agentrl.tool import Tool
from agentrl.types import Message

ASK = "Check your answer. If it is right, repeat it. If it is wrong, say what was wrong and give a better one."


class Reflect(Agent):
    """Asks `rounds` more times after each answer that calls no tool; a call goes out at once."""

    def __init__(self, tools: Sequence[Tool] = (), *, rounds: int = 1, ask: str = ASK) -> None:
        super().__init__(tools)
        self.rounds, self.ask = rounds, ask

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """The last of the answers."""
        self.messages += observation
        action = await self._reply(client)
        for _ in range(self.rounds):
            if action.get("tool_calls"):
                break
            self.messages.append({"role": "user", "content": self.ask})
            action = await self._reply(client)
        return action

    async def _reply(self, client: ChatClient) -> Message:
        settings: dict[str, Any] = {"tools": [tool.schema for tool in self.tools]} if self.tools else {}
        reply = await client.chat.completions.create(model="policy", messages=self.messages, **settings)
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return self.messages[-1]
