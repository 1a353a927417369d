"""Several agents that take turns, each with a context of its own: for negotiations and games.

Each observation is for the one whose turn it is, and its action carries its name: `Turn.agent` is that name, and an
environment that says whose a reward is (`info["agent_rewards"]`) uses the same names. With `algorithm.agents = "each"`
every agent learns from its own rewards alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.agent import Agent, ChatClient
from agentrl.errors import ConfigError
from agentrl.tool import Tool
from agentrl.types import Message


class InTurn(Agent):
    """`names` in the order in which they speak; `systems` are instructions by name."""

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        names: Sequence[str] = ("buyer", "seller"),
        systems: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(tools)
        systems = systems or {}
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise ConfigError(f"names = {list(names)} must be at least two, all different and none empty")
        if unknown := sorted(set(systems) - set(names)):
            raise ConfigError(f"systems has instructions for {unknown}, who are not in names = {list(names)}")
        self.names = tuple(names)
        self.contexts: dict[str, list[Message]] = {
            name: [{"role": "system", "content": systems[name]}] if name in systems else [] for name in names
        }
        self._spoken = 0

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """The answer of the one whose turn it is; one that calls tools goes on until it has said something."""
        name = self.names[self._spoken % len(self.names)]
        messages = self.contexts[name]
        messages += observation
        tools: dict[str, Any] = {"tools": [tool.schema for tool in self.tools]} if self.tools else {}
        reply = await client.chat.completions.create(
            model="policy", messages=messages, extra_body={"agent": name}, **tools
        )
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        if not messages[-1].get("tool_calls"):
            self._spoken += 1
        return {**messages[-1], "name": name}
