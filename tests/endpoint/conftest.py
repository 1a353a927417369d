"""One conversation with a scripted engine, and the real tokenizers where they were fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.session import Session
from agentrl.endpoint.template import ChatTemplate
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import make_tiny_model, tiny_tokenizer
from agentrl.types import Message

CASES = Path(__file__).parent.parent / "cases"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluates <|im_end|> nothing but sums.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


class Setup(NamedTuple):
    """An endpoint over a scripted engine that says `texts` in turn, over and over."""

    endpoint: Endpoint
    engine: ScriptedEngine
    template: ChatTemplate

    def open(self, **terms: Any) -> Session:
        return self.endpoint.open("s", **{"seed": 1, **terms})


MakeSetup = Callable[..., Setup]
Ask = Callable[..., Any]


@pytest.fixture
def chatml() -> Callable[[str], ChatTemplate]:
    """A template's source with the tiny tokenizer, which has ChatML's control tokens."""

    def make(source: str) -> ChatTemplate:
        return ChatTemplate(tiny_tokenizer(), source, specials={"eos_token": "<|im_end|>"}, context_length=4096)

    return make


@pytest.fixture
def tiny(tmp_path: Path) -> ChatTemplate:
    return ChatTemplate.load(make_tiny_model(tmp_path / "tiny", max_length=65536, describe_tools=True))


@pytest.fixture(scope="session")
def tiny_once(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(make_tiny_model(tmp_path_factory.mktemp("tiny"), max_length=65536, describe_tools=True))


@pytest.fixture
def setup(tiny: ChatTemplate) -> MakeSetup:
    def make(
        texts: Sequence[str] = ("yes<|im_end|>",),
        template: ChatTemplate | None = None,
        options: EndpointOptions | None = None,
        **engine: Any,
    ) -> Setup:
        template = template or tiny
        said = iter(range(1 << 30))

        def reply(prompt: object) -> list[int]:
            tokens: list[int] = template.encode_text(texts[next(said) % len(texts)]).tolist()
            return tokens

        scripted = ScriptedEngine(reply, decode=template.decode, **engine)
        return Setup(Endpoint(scripted, template, options), scripted, template)

    return make


async def ask(client: Any, messages: list[Message], **settings: Any) -> Message:
    """One call; the answer is appended to `messages` and returned."""
    reply = await client.chat.completions.create(model="policy", messages=messages, **settings)
    message: Message = reply.choices[0].message.model_dump(exclude_none=True)
    messages.append(message)
    return message


@pytest.fixture(name="ask")
def ask_fixture() -> Callable[..., Any]:
    return ask


@pytest.fixture
def calculator() -> dict[str, Any]:
    return CALCULATOR


def cases(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).read_text().splitlines() if line.strip()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, name in (("tool_case", "tool_calls.jsonl"), ("token_case", "tokenization.jsonl")):
        if fixture in metafunc.fixturenames:
            found = cases(name)
            metafunc.parametrize(fixture, found, ids=[case["id"] for case in found])
