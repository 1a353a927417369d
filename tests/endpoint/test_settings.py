"""Sampling settings of a direct session: what is refused by name, what is neutral, stops and log-probs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from agentrl.endpoint.options import EndpointOptions
from agentrl.errors import ContractError
from agentrl.types import Sampled

Ask = Any
MakeSetup = Any
USER = {"role": "user", "content": "q1"}


SETTINGS = [
    ("top_p", 0.9),
    ("top_k", 5),
    ("min_p", 0.1),
    ("frequency_penalty", 0.5),
    ("presence_penalty", 0.5),
    ("repetition_penalty", 1.1),
    ("logit_bias", {"5": 1.0}),
    ("response_format", {"type": "json_object"}),
    ("regex", "[0-9]+"),
    ("ebnf", 'root ::= "yes"'),
    ("temperature", 0),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
async def test_settings_that_break_log_probs_are_refused_by_name(
    setup: MakeSetup, ask: Ask, name: str, value: Any
) -> None:
    s = setup(grammars=True)
    with pytest.raises(ContractError, match=name):
        await ask(s.open(), [USER], **{name: value})
    assert not s.engine.requests
    if name == "logit_bias":
        return
    await ask(s.open(training=False), [USER], **{name: value})
    session = setup(["a<|im_end|>"], None, EndpointOptions(untrained_sampling="mark"), grammars=True).open()
    await ask(session, [USER], **{name: value})
    (trajectory,) = await session.close()
    assert not trajectory.loss_mask.any()


@pytest.mark.parametrize(
    "settings",
    [
        {"nonsense": 1},
        {"n": 0},
        {"n": True},
        {"temperature": float("nan")},
        {"temperature": -1},
        {"max_tokens": 0},
        {"stop": [""]},
        {"stop": 5},
        {"tools": [{"name": "f"}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": 3},
        {"response_format": {"type": "xml"}},
        {"top_logprobs": 3},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": True, "logprobs": True},
        {"regex": ""},
        {"ebnf": 3},
        {"regex": "a", "response_format": {"type": "json_object"}},
        {"seed": "x"},
    ],
)
async def test_a_setting_that_cannot_be_served_is_refused_by_name(setup: MakeSetup, ask: Ask, settings: Any) -> None:
    with pytest.raises(ContractError, match=next(iter(settings))):
        await ask(setup().open(), [USER], **settings)


async def test_neutral_settings_are_fine_and_seeds_are_repeatable(setup: MakeSetup, ask: Ask) -> None:
    s = setup()
    neutral = {"top_p": 1, "top_k": -1, "frequency_penalty": 0, "user": "x", "store": False, "stream": False}
    for seed in (1, 1, 2):
        session = s.open(seed=seed)
        await ask(session, [USER], **neutral)
        await ask(session, [USER])
    seeds = [request.sampling.seed for request in s.engine.requests]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    await ask(s.open(seed=None), [USER])
    assert s.engine.requests[-1].sampling.seed is None


async def test_stop_strings_end_the_text_but_stay_recorded(setup: MakeSetup, ask: Ask) -> None:
    s = setup(["one STOP two", "b<|im_end|>"])
    session = s.open()
    messages = [USER]
    assert (await ask(session, messages, stop="STOP"))["content"] == "one "
    messages.append({"role": "user", "content": "on"})
    await ask(session, messages)
    (trajectory,) = await session.close()
    first = next(x for x in trajectory.segments if isinstance(x.source, Sampled) and x.source.trained)
    assert s.template.decode(first.tokens) == "one STOP"


async def test_logprobs(setup: MakeSetup) -> None:
    reply = await setup(["ab<|im_end|>"]).open().chat.completions.create(model="m", messages=[USER], logprobs=True)
    content = reply.choices[0].logprobs.content
    assert [(x.token, x.logprob) for x in content] == [("a", -0.5), ("b", -0.5), ("<|im_end|>", -0.5)]


def test_no_torch_in_a_scripted_episode() -> None:
    code = """
import asyncio, sys, tempfile
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import make_tiny_model

async def main():
    template = ChatTemplate.load(make_tiny_model(tempfile.mkdtemp()))
    endpoint = Endpoint(ScriptedEngine(lambda prompt: [65, 258]), template)
    await endpoint.start()
    session = endpoint.open("s", seed=1)
    for client in (session, session.openai()):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
    assert len(await session.close()) == 2
    await endpoint.stop()

asyncio.run(main())
print(sorted({"torch", "transformers", "deepspeed"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "[]", done.stderr
