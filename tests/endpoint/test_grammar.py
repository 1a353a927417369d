"""`response_format` and its kin: what the engine is asked for, and what a client hears of one without grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agentrl.endpoint.request import Refused
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.types import Grammar
from tests.endpoint.conftest import CALCULATOR, Ask, MakeSetup

USER = {"role": "user", "content": "Where?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
ANSWER = json.dumps({"city": "Oslo"})

# As DeepSeek's and Qwen's thinking models: the prompt opens the reasoning.
OPENS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("settings", "grammar"),
    [
        ({"response_format": FORMAT}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type": "object"}')),
        ({"response_format": {"type": "text"}}, None),
        ({"extra_body": {"regex": "[a-z]+"}}, Grammar("regex", "[a-z]+")),
        ({"extra_body": {"ebnf": 'root ::= "yes"'}}, Grammar("ebnf", 'root ::= "yes"')),
    ],
)
async def test_grammars_reach_the_engine(setup: MakeSetup, ask: Ask, settings: Any, grammar: Grammar | None) -> None:
    s = setup([ANSWER + "<|im_end|>"], grammars=True)
    said = await ask(s.open(training=False), [USER], **settings)
    assert said["content"] == ANSWER
    assert s.engine.requests[0].sampling.grammar == grammar


async def test_an_engine_without_grammars_is_named_by_the_parameter(setup: MakeSetup, ask: Ask) -> None:
    s = setup()
    session = s.open(training=False)
    for settings, name in (({"response_format": FORMAT}, "response_format"), ({"regex": "a"}, "regex")):
        with pytest.raises(Refused, match="no grammars") as refused:
            await ask(session, [USER], **settings)
        assert refused.value.param == name
    assert session.failure is None
    await s.endpoint.start()
    client = session.openai()
    with pytest.raises(openai.BadRequestError) as told:
        await ask(client, [USER], response_format=FORMAT)
    assert told.value.body == {
        "message": str(told.value.body["message"]),  # type: ignore[index]
        "type": "invalid_request_error",
        "param": "response_format",
        "code": None,
    }
    assert "no grammars" in told.value.message
    assert await session.close() == ()
    await s.endpoint.stop()


async def test_a_grammar_and_a_forced_call_exclude_each_other(setup: MakeSetup, ask: Ask) -> None:
    session = setup(grammars=True).open(training=False)
    with pytest.raises(Refused, match="exclude"):
        await ask(session, [USER], tools=[CALCULATOR], tool_choice="required", response_format=FORMAT)


async def test_reasoning_that_the_template_opened_is_closed_before_a_grammar(
    setup: MakeSetup, ask: Ask, chatml: Callable[[str], ChatTemplate]
) -> None:
    s = setup([ANSWER + "<|im_end|>"], chatml(OPENS_THINKING), grammars=True)
    session = s.open(training=False)
    messages = [USER]
    said = await ask(session, messages, response_format=FORMAT)
    assert said["content"] == ANSWER
    shown = s.template.decode(s.engine.requests[0].tokens)
    assert shown.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    messages.append({"role": "user", "content": "And?"})
    await ask(session, messages, response_format=FORMAT)
    (trajectory,) = await session.close()
    assert not trajectory.loss_mask[: len(s.engine.requests[0].tokens)].any()
