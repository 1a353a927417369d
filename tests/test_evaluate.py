"""An environment played against an OpenAI-compatible endpoint: here our own, over a scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import Agent
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.env import Env
from agentrl.evaluate import evaluate_api
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Info, Message, Step


class Yes(Env):
    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        return [{"role": "user", "content": self.row["ask"]}], {}

    async def step(self, action: Message) -> Step:
        return Step([], float(action["content"] == self.row["answer"]), True, False, {})


ROWS = [{"ask": "a?", "answer": "yes"}, {"ask": "b?", "answer": "no"}]


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    return ChatTemplate.load(make_tiny_model(tmp_path, layers=1, hidden=32, intermediate=32))


async def play(base_url: str, api_key: str) -> Any:
    return await evaluate_api(
        Yes,
        Agent,
        list(ROWS),
        base_url=base_url,
        api_key=api_key,
        model="any",
        samples=2,
        concurrency=2,
        temperature=1.0,
        max_turns=4,
        seed=0,
    )


async def test_rewards_over_a_real_openai_endpoint(template: ChatTemplate) -> None:
    said = [*template.encode_text("yes").tolist(), *sorted(template.end_ids)[:1]]
    endpoint = Endpoint(ScriptedEngine(lambda _: said), template)
    await endpoint.start()
    session = endpoint.open("eval", training=False)
    found = await play(session.base_url, session.api_key)
    assert (found.reward, found.scored, found.stops, found.turns) == (0.5, 4, {"finished": 4}, 1.0)
    refused = await play(session.base_url.replace(session.api_key, "wrong"), "wrong")
    assert (refused.reward, refused.scored) == (None, 0)
    assert "no open session has this key" in refused.error
    await endpoint.stop()
