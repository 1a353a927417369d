"""An agent for `agentrl.envs.code`: told how to work, and forgetful of long outputs it has already answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.agent import Agent, ChatClient
from agentrl.tool import Tool
from agentrl.types import Message

WITH_TOOLS = (
    "You are a programmer. Write the program to solution.py with write_file, try it with run, and mend it until it is "
    "right. Then call submit."
)
WITHOUT_TOOLS = "You are a programmer. Answer with one complete Python program in a ```python block."


class Coder(Agent):
    """`system` replaces the instructions. With `keep` > 0, tool outputs but for the last `keep` messages are cut to
    `short` characters before each call: the history is rewritten, so a new trajectory starts where that happens."""

    def __init__(
        self, tools: Sequence[Tool] = (), *, system: str | None = None, keep: int = 0, short: int = 200
    ) -> None:
        super().__init__(tools)
        text = system if system is not None else (WITH_TOOLS if tools else WITHOUT_TOOLS)
        self.messages: list[Message] = [{"role": "system", "content": text}] if text else []
        self.keep, self.short = keep, short

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """Ask once, with the tools."""
        self.messages += observation
        if self.keep:
            self.messages = [*map(self._shortened, self.messages[: -self.keep]), *self.messages[-self.keep :]]
        settings: dict[str, Any] = {"tools": [tool.schema for tool in self.tools]} if self.tools else {}
        reply = await client.chat.completions.create(model="policy", messages=self.messages, **settings)
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return self.messages[-1]

    def _shortened(self, message: Message) -> Message:
        text = message.get("content")
        if message["role"] != "tool" or not isinstance(text, str) or len(text) <= self.short:
            return message
        return {**message, "content": text[: self.short] + " …"}
