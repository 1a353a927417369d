"""A turn that the engine interrupts anywhere is, to the agent and in the record, the turn as it would have been."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.client import EngineClient
from agentrl.testing.scripted_server import Fault, ScriptedServer
from agentrl.types import Trajectory

ASK: Any = [{"role": "user", "content": "what is 1?"}]
CALL = '<tool_call>\n{"name": "calc", "arguments": {"expression": "1"}}\n</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nI look, é.\n{CALL}<|im_end|>"


async def turn(
    template: ChatTemplate, tools: list[Any], faults: Sequence[Fault], stop: list[str] | None = None
) -> tuple[Any, Trajectory, int]:
    """The message, what was recorded and how often the engine was asked."""
    said: list[int] = template.encode_text(SAID).tolist()

    def rest(prompt: Sequence[int]) -> list[int]:
        known = next(k for k in range(len(said), -1, -1) if list(prompt[len(prompt) - k :]) == said[:k])
        return said[known:]

    async with ScriptedServer(rest) as server:
        server.faults += faults
        engine = EngineClient(server.url, decode=template.decode)
        session = Endpoint(engine, template).open("s", seed=1)
        reply = await session.chat.completions.create(model="m", messages=ASK, tools=tools, stop=stop)
        (trajectory,) = await session.close()
        await engine.close()
        asked = sum(path == "/generate" for path, _ in server.calls)
    choice = reply.choices[0]
    assert choice.finish_reason == ("stop" if stop else "tool_calls")
    return choice.message.model_dump(exclude_none=True), trajectory, asked


@pytest.mark.parametrize("kind", ["abort", "reset"])
@pytest.mark.parametrize("after", [1, 7, 15, 20])
async def test_within_thoughts_characters_and_calls(tiny: ChatTemplate, calculator: Any, kind: str, after: int) -> None:
    whole, recorded, _ = await turn(tiny, [calculator], [])
    found, trajectory, asked = await turn(tiny, [calculator], [Fault(kind, after=after), Fault("abort", after=1)])
    assert asked == 3
    assert found == whole
    assert trajectory.tokens.tolist() == recorded.tokens.tolist()
    assert trajectory.loss_mask.tolist() == recorded.loss_mask.tolist()


async def test_in_the_step_of_the_end_of_the_turn(tiny: ChatTemplate, calculator: Any) -> None:
    whole, recorded, _ = await turn(tiny, [calculator], [])
    at = len(tiny.encode_text(SAID))
    found, trajectory, asked = await turn(tiny, [calculator], [Fault("late_abort", after=at)])
    assert (asked, found) == (1, whole)
    assert trajectory.tokens.tolist() == recorded.tokens.tolist()


async def test_in_the_step_that_completes_a_stop_string(tiny: ChatTemplate, calculator: Any) -> None:
    at = len(tiny.encode_text(SAID.split("k,")[0] + "k,"))
    found, trajectory, asked = await turn(tiny, [calculator], [Fault("late_abort", after=at)], stop=["ook,"])
    assert (asked, found["content"], found["reasoning_content"]) == (1, "I l", "hm")
    assert tiny.decode(trajectory.tokens).endswith("I look,")
