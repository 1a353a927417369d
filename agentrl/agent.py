"""The agent contract: plain OpenAI-client code that turns an observation into an action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.tool import Tool


class Completions(Protocol):
    """`client.chat.completions`."""

    async def create(self, *, messages: Any, model: str, **settings: Any) -> Any:
        """One chat completion; the result is an `openai.types.chat.ChatCompletion`."""
        ...


class Chat(Protocol):
    """`client.chat`."""

    @property
    def completions(self) -> Any:
        """Has `create`, see `Completions`."""
        ...


class ChatClient(Protocol):
    """What an agent is given. `openai.AsyncOpenAI` satisfies it, and so does the direct session."""

    @property
    def chat(self) -> Any:
        """See `Chat`."""
        ...


class Agent:
    """Decides. A fresh instance an episode; owns its context, so a subclass may compact or rewrite it.

    The base class is the plain chat agent: it appends the observation, asks once, appends the answer.

    ```python
    class Terse(Agent):
        async def act(self, observation, client):
            self.messages += observation
            reply = await client.chat.completions.create(model="policy", messages=self.messages, max_tokens=16)
            self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            return self.messages[-1]
    ```
    """

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = tools
        self.messages: list[Message] = []

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """Answer the observation with one assistant message."""
        self.messages += observation
        settings: dict[str, Any] = {"tools": [tool.schema for tool in self.tools]} if self.tools else {}
        reply = await client.chat.completions.create(model="policy", messages=self.messages, **settings)
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return self.messages[-1]
