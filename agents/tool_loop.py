"""Runs tools of its own until it has an answer; only the answer is an action of the environment.

The environment's own tools are offered too, and a call of one of those goes out as the action. A tool of the agent's
is a typed function (`@tool`) by dotted path, so that one environment can be tried with and without it:

    [agent]
    path = "agentrl.agents.tool_loop:ToolLoop"
    args = {paths = ["my_tools.py:look_up"], most = 8}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.agent import Agent, ChatClient
from agentrl.config import resolve_object
from agentrl.errors import ConfigError
from agentrl.tool import Tool, run_tools
from agentrl.types import Message


class ToolLoop(Agent):
    """`own` are tools, `paths` name such; at most `most` model calls a turn.

    A message that calls the environment's tools too is the environment's, whole.
    """

    def __init__(
        self, tools: Sequence[Tool] = (), *, own: Sequence[Tool] = (), paths: Sequence[str] = (), most: int = 8
    ) -> None:
        super().__init__(tools)
        if most < 1:
            raise ConfigError(f"most = {most} must be at least 1")
        self.own = [*own, *map(_tool, paths)]
        self.most = most
        theirs = {tool.name for tool in tools}
        if both := [tool.name for tool in self.own if tool.name in theirs]:
            raise ConfigError(f"the environment has tools named {both} too; rename the agent's with @tool(name=…)")

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """Ask and run tools until there is an answer, or a call that is the environment's."""
        self.messages += observation
        mine = {tool.name for tool in self.own}
        schemas = [tool.schema for tool in (*self.own, *self.tools)]
        # The same tools at every call: others would start a new trajectory.
        settings: dict[str, Any] = {"tools": schemas} if schemas else {}
        for asked in range(1, self.most + 1):
            reply = await client.chat.completions.create(model="policy", messages=self.messages, **settings)
            self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            calls = self.messages[-1].get("tool_calls") or []
            if not calls or asked == self.most or not all(call["function"]["name"] in mine for call in calls):
                break
            self.messages += await run_tools(self.own, self.messages[-1])
        return self.messages[-1]


def _tool(path: str) -> Tool:
    found = resolve_object(path)
    if not isinstance(found, Tool):
        raise ConfigError(f"{path!r} is a {type(found).__name__}, not a tool: put @tool on the function")
    return found
