"""Two agents that work together: a planner says what to do, a worker does it. One action, two contexts, one reward.

    planner   sees the observations and all that was done        "Add the two, then halve."
    worker    sees the observation and the plan, has the tools   calc("(3 + 5) / 2")   → the action

Their calls are told apart by name (`agent`): each has trajectories of its own, and both belong to the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.agent import Agent, ChatClient
from agentrl.tool import Tool
from agentrl.types import Message

PLAN = "You plan and another one does. Say in one or two sentences what to do next; do not do it yourself."
WORK = "Follow the plan that you are given."
TOLD = "Plan: {plan}"


class Pair(Agent):
    """`plan` and `work` are their instructions, as system messages; "" leaves one out."""

    def __init__(self, tools: Sequence[Tool] = (), *, plan: str = PLAN, work: str = WORK) -> None:
        super().__init__(tools)
        self.planner: list[Message] = [{"role": "system", "content": plan}] if plan else []
        self.worker: list[Message] = [{"role": "system", "content": work}] if work else []

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """The worker's message."""
        self.planner += [_told(message) for message in observation]
        plan = await self._ask("planner", self.planner, client, {})
        self.worker += [*observation, {"role": "user", "content": TOLD.format(plan=plan.get("content") or "")}]
        tools: dict[str, Any] = {"tools": [tool.schema for tool in self.tools]} if self.tools else {}
        action = await self._ask("worker", self.worker, client, tools)
        self.planner.append({"role": "user", "content": f"Done: {_done(action)}"})
        return {**action, "name": "worker"}

    async def _ask(self, name: str, messages: list[Message], client: ChatClient, settings: dict[str, Any]) -> Message:
        reply = await client.chat.completions.create(
            model="policy", messages=messages, extra_body={"agent": name}, **settings
        )
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return messages[-1]


def _told(message: Message) -> Message:
    """The planner calls no tools, so their answers are somebody's words to it."""
    return {"role": "user", "content": f"Result: {message['content']}"} if message["role"] == "tool" else message


def _done(action: Message) -> str:
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in action.get("tool_calls") or []]
    return "; ".join(filter(None, [action.get("content") or "", *calls]))
