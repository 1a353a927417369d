"""Random conversations on real tokenizers and templates: what is recorded is what was sent and received, to the byte,
and each context is what the model's own template writes there.

The tokenizers come from `tests/fetch/fetch_tokenizers.py`, which the fixtures run; without a network and a cache they
skip.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import urllib.error
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.parse import Format, detect_format
from agentrl.endpoint.render import Renderer
from agentrl.endpoint.template import ChatTemplate
from agentrl.testing.scripted import ScriptedEngine
from agentrl.types import Context, Message, Sampled, Trajectory

HERE = Path(__file__).parent
# Each with its tokenizer, and with a published chat template where the tokenizer's package has another.
PUBLISHED = {
    "qwen2_5": ("qwen3", "qwen2_5.jinja"),
    "qwen3_5": ("qwen3", "qwen3_5_think.jinja"),
    "llama3_1_tools": ("llama3_1", "llama3_1.jinja"),
}
TEMPLATES = ("qwen3", "qwen2_5", "qwen3_5", "llama3_1", "llama3_1_tools", "smollm2")
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


@cache
def fetcher() -> Any:
    spec = importlib.util.spec_from_file_location("fetch_tokenizers", HERE.parent / "fetch" / "fetch_tokenizers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def load(name: str) -> ChatTemplate:
    tokenizer, file = PUBLISHED.get(name, (name, None))
    try:
        folder = fetcher().smollm2() if name == "smollm2" else fetcher().fetch(tokenizer)
        source = None if file is None else (fetcher().templates() / file).read_text()
    except (urllib.error.URLError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the tokenizer of {name} is not cached and cannot be fetched: {error}")
    return ChatTemplate.load(folder, chat_template=source)


class Say(NamedTuple):
    """One turn: what the model samples, how it ends, and the messages that follow."""

    text: str
    ended: bool
    calls: int
    new: list[Message]


def texts(template: ChatTemplate) -> st.SearchStrategy[str]:
    control = sorted(t for t in template.added if template.added[t][0] in template.control_ids)
    pieces = st.sampled_from(
        [*control[:40], "\n", " ", "北京", "é", "e\u0301", "😀", "None", "{}", "\\", '"', "<|im_", "end|>"]
    )
    return st.lists(pieces | spellable(template, 6), max_size=6).map("".join)


def spellable(template: ChatTemplate, size: int) -> st.SearchStrategy[str]:
    """Text that the tokenizer can write at all: SmolLM2's vocabulary lacks some bytes."""

    def kept(text: str) -> str:
        return "".join(c for c in text if template.decode(template.encode_text(c)) == normal(template, c))

    return st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ue005"), max_size=size).map(
        kept
    )


@cache
def endpoint(name: str) -> Endpoint:
    return Endpoint(ScriptedEngine(lambda prompt: []), load(name))


@st.composite
def conversations(draw: st.DrawFn, name: str) -> tuple[list[Message], list[Say], bool]:
    template = load(name)
    content = texts(template)
    start: list[Message] = [{"role": "user", "content": draw(content)}]
    if draw(st.booleans()):
        start.insert(0, {"role": "system", "content": draw(content)})
    tools = draw(st.booleans()) and "tools" in template.source
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        calls = draw(st.integers(0, 2)) if tools else 0
        said = draw(spellable(template, 8))
        new: list[Message] = [{"role": "tool", "content": draw(content)} for _ in range(calls)]
        if not calls or draw(st.booleans()):
            new.append({"role": "user", "content": draw(content)})
        turns.append(Say(said, draw(st.booleans()), calls, new))
    return start, turns, tools


def sampled_text(template: ChatTemplate, say: Say) -> str:
    if detect_format(template.source) is Format.QWEN3_CODER:
        call = f"<function=f>\n<parameter=a>\n{say.text}\n</parameter>\n</function>"
        return "hm\n</think>\n\n" + say.text + f"\n<tool_call>\n{call}\n</tool_call>" * say.calls
    call = json.dumps({"name": "f", "parameters" if "eot_id" in template.source else "arguments": {"a": say.text}})
    if "eot_id" in template.source:
        return ";".join([call] * say.calls) if say.calls else say.text
    return say.text + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for _ in range(say.calls))


async def play(
    name: str, start: list[Message], turns: list[Say], tools: bool
) -> tuple[tuple[Trajectory, ...], list[Message], ScriptedEngine]:
    template = load(name)
    end = endpoint(name).renderer.end_id
    script = iter(turns)

    def reply(prompt: object) -> list[int]:
        say = next(script)
        tokens: list[int] = template.encode_text(sampled_text(template, say)).tolist()
        return [*tokens, end] if say.ended or not tokens else tokens

    engine = ScriptedEngine(reply)
    endpoint(name).engine = engine
    session = endpoint(name).open("s", seed=1, max_tokens=100_000)
    messages = list(start)
    for say in turns:
        reply_ = await session.chat.completions.create(model="m", messages=messages, tools=TOOLS if tools else [])
        message = reply_.choices[0].message.model_dump(exclude_none=True)
        ids = [call["id"] for call in message.get("tool_calls", [])]
        assert len(ids) == say.calls
        named = iter(ids)
        messages.append(message)
        messages += [{**m, "tool_call_id": next(named)} if m["role"] == "tool" else m for m in say.new]
    return await session.close(), messages, engine


QUICK = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", TEMPLATES)
@QUICK
@given(data=st.data())
def test_recorded_is_sent_and_received_and_the_templates_own(name: str, data: st.DataObject) -> None:
    check(name, data)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TEMPLATES)
@LONG
@given(data=st.data())
def test_many_conversations_are_recorded_as_sent_and_received(name: str, data: st.DataObject) -> None:
    check(name, data)


def check(name: str, data: st.DataObject) -> None:
    template, (start, turns, tools) = load(name), data.draw(conversations(name))
    (trajectory,), messages, engine = asyncio.run(play(name, start, turns, tools))
    context = [s for s in trajectory.segments if isinstance(s.source, Context)]
    sampled = [s for s in trajectory.segments if isinstance(s.source, Sampled)]
    so_far = np.empty(0, np.int32)
    for request, shown, said in zip(engine.requests, context, sampled, strict=True):
        assert np.array_equal(request.tokens, np.concatenate((so_far, shown.tokens)))
        so_far = np.concatenate((request.tokens, said.tokens))
    assert np.array_equal(trajectory.tokens, so_far)
    first = template.unmarked(template.text(start, TOOLS if tools else [], generation=True))
    assert template.decode(context[0].tokens) == normal(template, first)
    if name != "llama3_1_tools":  # it renders one call a turn, so the whole history is not always renderable
        for i in range(1, len(turns)):
            wanted = after_turn(name, messages, i, turns, tools)
            assert template.decode(context[i].tokens) == normal(template, wanted)
    harmless = [plain(m) for m in start]
    (clean,), _, _ = asyncio.run(
        play(name, harmless, [t._replace(new=[plain(m) for m in t.new]) for t in turns], tools)
    )
    assert control_tokens(template, trajectory) == control_tokens(template, clean)


def after_turn(name: str, messages: list[Message], turn: int, turns: list[Say], tools: bool) -> str:
    """What the template writes after the turn before `turn`, with the whole history in front of it."""
    template, end = load(name), endpoint(name).renderer.end_text
    spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    at, upto = spoken[turn - 1], spoken[turn]
    history = [
        dict(m, content="\ue005", reasoning_content=None) if i == at else m for i, m in enumerate(messages[:upto])
    ]
    text = template.text(history, TOOLS if tools else [], generation=True)
    tail = text[text.rindex("\ue005") :]
    closing = tail.index(end)
    last = turns[turn - 1]
    ended = last.ended or not sampled_text(template, last)
    return template.unmarked(tail[closing + len(end) :] if ended else tail[closing:])


def normal(template: ChatTemplate, text: str) -> str:
    normalizer = template.tokenizer.normalizer
    return text if normalizer is None else str(normalizer.normalize_str(text))


def plain(message: Message) -> Message:
    return {**message, "content": "x"}


def control_tokens(template: ChatTemplate, trajectory: Trajectory) -> list[int]:
    shown = np.concatenate([s.tokens for s in trajectory.segments if isinstance(s.source, Context)]).tolist()
    return [token for token in shown if token in template.control_ids]


@pytest.mark.parametrize("name", TEMPLATES)
def test_harmless_text_is_encoded_as_the_tokenizer_encodes_the_whole(name: str) -> None:
    template = load(name)
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "\n 12 + 7?\n\n"},
    ]
    text = template.text(messages, generation=True)
    whole = template.tokenizer.encode(text, add_special_tokens=False).ids
    assert template.encode(messages, generation=True).tolist() == whole
    bos = template.specials.get("bos_token")
    assert bos != "<|begin_of_text|>" or text.count(bos) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_is_proved(name: str) -> None:
    Renderer(load(name)).require_proof()
