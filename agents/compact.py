"""For long episodes: when the history grows long, the model writes a summary and goes on from that alone.

The summary is a model call of the turn in which it was needed, and the history after it is a new trajectory. Both
belong to that turn, so a summary is credited with what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.agent import Agent, ChatClient
from agentrl.errors import ConfigError
from agentrl.tool import Tool
from agentrl.types import Message

ASK = "This gets long. Write down all that you need to go on without it: the task, what you found, what is left."


class Compact(Agent):
    """Compacts before a call whose history would have more than `longest` characters. The first `keep_first` messages
    (the task) and the newest observation stay as they are."""

    def __init__(
        self, tools: Sequence[Tool] = (), *, longest: int = 12_000, keep_first: int = 1, ask: str = ASK
    ) -> None:
        super().__init__(tools)
        if longest < 1 or keep_first < 0:
            raise ConfigError(f"longest = {longest} must be at least 1 and keep_first = {keep_first} at least 0")
        self.longest, self.keep_first, self.ask = longest, keep_first, ask
        self.compacted = 0

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """Compact where needed, then answer."""
        answered = any(message["role"] == "assistant" for message in self.messages[self.keep_first :])
        if answered and _length(self.messages) + _length(observation) > self.longest:
            observation = await self._compact(observation, client)
        self.messages += observation
        self.messages.append(await self._reply(client))
        return self.messages[-1]

    async def _compact(self, observation: list[Message], client: ChatClient) -> list[Message]:
        # The answers of tools come after their calls, so what was called must be answered before a summary is asked
        # for; afterwards there is no call any more that they could belong to.
        answers = [message for message in observation if message["role"] == "tool"]
        self.messages += [*answers, {"role": "user", "content": self.ask}]
        summary = (await self._reply(client)).get("content") or ""
        # As the model's own words: to go on with somebody else's would be a branch, and what it left not trained.
        self.messages = [*self.messages[: self.keep_first], {"role": "assistant", "content": summary}]
        self.compacted += 1
        shown = [{"role": "user", "content": f"Tool: {message['content']}"} for message in answers]
        return [*shown, *(message for message in observation if message["role"] != "tool")]

    async def _reply(self, client: ChatClient) -> Message:
        settings: dict[str, Any] = {"tools": [tool.schema for tool in self.tools]} if self.tools else {}
        reply = await client.chat.completions.create(model="policy", messages=self.messages, **settings)
        answer: Message = reply.choices[0].message.model_dump(exclude_none=True)
        return answer


def _length(messages: Sequence[Message]) -> int:
    return sum(
        len(str(message.get("content") or "")) + len(str(message.get("tool_calls") or "")) for message in messages
    )
