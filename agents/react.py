"""ReAct: thinks, names an action in plain text, and reads what came of it; for models and templates without tool calls.

    assistant  Thought: I need the product first.
               Action: calc({"expression": "12 * 7"})
    user       Observation: 84
    assistant  Thought: Now I know it.
               Answer: 84

To the environment the action is a tool call like any other, and `Answer:` is the text without the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from agentrl.agent import Agent, ChatClient
from agentrl.tool import Tool
from agentrl.types import Message

HOW = """Work in steps. Write one of these and stop:
Thought: what you think
Action: tool({{"argument": "value"}})
or, when you know the answer:
Thought: what you think
Answer: the answer alone

Tools:
{tools}"""
_ACTION = re.compile(r"^Action:[ \t]*([\w.-]+)[ \t]*\((.*)\)[ \t]*$", re.MULTILINE | re.DOTALL)
_ANSWER = re.compile(r"^Answer:[ \t]*", re.MULTILINE)


class ReAct(Agent):
    """`stop` strings end the answer before the model makes up an observation of its own."""

    def __init__(
        self, tools: Sequence[Tool] = (), *, system: str = HOW, stop: Sequence[str] = ("\nObservation:",)
    ) -> None:
        super().__init__(tools)
        told = system.format(tools="\n".join(map(_described, tools)) or "none")
        self.messages: list[Message] = [{"role": "system", "content": told}]
        self.stop = list(stop)
        self._calls = 0

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """Ask once; what the text asks for becomes the action."""
        self.messages += [_as_text(message) for message in observation]
        settings = {"stop": self.stop} if self.stop else {}
        reply = await client.chat.completions.create(model="policy", messages=self.messages, **settings)
        said = reply.choices[0].message
        self.messages.append(said.model_dump(exclude_none=True))
        return self._action(said.content or "")

    def _action(self, text: str) -> Message:
        answer, action = _ANSWER.search(text), _ACTION.search(text)
        if action and not (answer and answer.start() < action.start()):
            self._calls += 1
            function = {"name": action[1], "arguments": action[2].strip() or "{}"}
            call = {"id": f"react{self._calls:04d}", "type": "function", "function": function}
            return {"role": "assistant", "content": text[: action.start()].strip() or None, "tool_calls": [call]}
        return {"role": "assistant", "content": text[answer.end() :].strip() if answer else text}


def _described(tool: Tool) -> str:
    function = tool.schema["function"]
    return f"{function['name']}({json.dumps(function['parameters'].get('properties', {}))}): {function['description']}"


def _as_text(message: Message) -> Message:
    """Tool answers as a user's words: the model was shown no tools."""
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"Observation: {message['content']}"}
