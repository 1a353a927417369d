"""Tool calls and reasoning: the public cases, the formats, and that nothing a model writes raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.endpoint.lenient import Finder
from agentrl.endpoint.parse import Call, Format, detect_format, parse
from agentrl.endpoint.reply import message_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}, "o": {"type": "object"}},
            },
        },
    }
]


def test_case(tool_case: dict[str, Any]) -> None:
    given, expected = tool_case["input"], tool_case["expected"]
    truncated = given.get("finish_reason") == "length"
    parsed = parse(
        given["text"],
        Format(given["format"]),
        thinking=given.get("thinking", False),
        truncated=truncated,
        tools=given.get("tools", ()),
    )
    assert expected.get("reasoning", parsed.reasoning) == parsed.reasoning
    assert [call._asdict() for call in parsed.calls] == expected["calls"]
    assert len(parsed.errors) == expected["errors"]
    assert expected.get("content_before", parsed.before) == parsed.before
    assert expected.get("content_after", parsed.after) == parsed.after
    message = message_of(parsed, [f"call{i:05d}" for i in range(len(parsed.calls))])
    ids = [call["id"] for call in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids) == len(expected["calls"])
    assert [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", [])] == [
        call["arguments"] for call in expected["calls"]
    ]
    for error in parsed.errors:
        assert error.text in message["content"]
        assert {"text": error.text, "error": error.reason} in message["tool_call_errors"]


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('{"name": "f", "arguments": {}}', [Call("f", {})]),
        ('{"name": "f"}', [Call("f", {})]),
        ('{"name": "f", "arguments": null}', [Call("f", {})]),
        ('{"name": "f", "parameters": {"a": 1}}', [Call("f", {"a": 1})]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [Call("f", {}), Call("g", {})]),
        ('{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}', [Call("f", {}), Call("g", {})]),
        (f'{{"name": "f", "arguments": {{"n": {10**400}}}}}', [Call("f", {"n": 10**400})]),
    ],
)
def test_hermes_reads(body: str, calls: list[Call]) -> None:
    parsed = parse(hermes(body), Format.HERMES)
    assert list(parsed.calls) == calls
    assert not parsed.errors


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "a b"}',
        '{"name": "f", "arguments": "{} {}"}',
        '{"name": "f", "arguments": {}}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}",
        '{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    ],
)
def test_hermes_reports(body: str) -> None:
    parsed = parse(hermes(body), Format.HERMES)
    assert not parsed.calls
    assert len(parsed.errors) == 1
    assert parsed.content == hermes(body)


def test_a_bad_call_does_not_hide_the_next() -> None:
    parsed = parse(hermes("{oops") + "\n" + hermes('{"name": "f", "arguments": {}}'), Format.HERMES)
    assert [c.name for c in parsed.calls] == ["f"]
    assert [e.text for e in parsed.errors] == [hermes("{oops")]


def test_an_unclosed_call_counts_where_the_turn_ended_by_itself() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}'
    assert parse(text, Format.HERMES).calls == (Call("f", {}),)
    assert len(parse(text, Format.HERMES, truncated=True).errors) == 1


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("why\n</think>\n\nso", True, "why", "so"),
        ("<think>\n\n</think>\n\nso", False, "", "so"),
        ("<think>cut", False, "cut", ""),
        ("cut", True, "cut", ""),
        ("the <think> tag", False, None, "the <think> tag"),
        ("a</think>b", False, None, "a</think>b"),
        ("<think>a</think>b<think>c</think>d", False, "a\nc", "bd"),
    ],
)
def test_reasoning(text: str, thinking: bool, reasoning: str | None, content: str) -> None:
    for form in (Format.HERMES, Format.NONE):
        parsed = parse(text, form, thinking=thinking)
        assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_a_draft_in_unclosed_reasoning_is_no_call() -> None:
    parsed = parse("<think>" + hermes('{"name": "rm", "arguments": {}}'), Format.HERMES)
    assert (parsed.calls, parsed.errors, parsed.content) == ((), (), "")


def test_a_closing_thought_inside_an_argument_is_text() -> None:
    parsed = parse(hermes('{"name": "f", "arguments": {"t": "<think>a</think>"}}'), Format.HERMES)
    assert parsed.calls == (Call("f", {"t": "<think>a</think>"}),)
    assert parsed.reasoning is None


def test_qwen3_coder() -> None:
    text = (
        "ok\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n"
        '<parameter=o>\n{"a": [1]}\n</parameter>\n<parameter=s>\n  a </parameter> b\n\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    parsed = parse(text, Format.QWEN3_CODER, tools=TOOLS)
    assert parsed.calls == (Call("f", {"n": 3, "on": True, "o": {"a": [1]}, "s": "  a </parameter> b\n"}),)
    assert parsed.content == "ok\n"
    for bad in ("<tool_call>\n<function=f>\n<parameter=n>\n3", "<tool_call>\n{}\n</tool_call>", "<tool_call>"):
        assert len(parse(bad, Format.QWEN3_CODER, tools=TOOLS).errors) == 1


def test_llama3_json() -> None:
    one, two = '{"name": "f", "parameters": {"a": 1}}', '{"name": "g", "parameters": {}}'
    for text in (f"{one}; {two}", f"<|python_tag|>{one};{two}"):
        assert parse(text, Format.LLAMA3_JSON).calls == (Call("f", {"a": 1}), Call("g", {}))
    assert len(parse('{"name": "f", "parameters": {', Format.LLAMA3_JSON).errors) == 1
    assert len(parse("<|python_tag|>print(1)", Format.LLAMA3_JSON).errors) == 1
    assert parse('Use {"name": "f"}', Format.LLAMA3_JSON).content == 'Use {"name": "f"}'
    assert parse('{"answer": 3}', Format.LLAMA3_JSON) == parse('{"answer": 3}', Format.NONE)


def test_plain_json() -> None:
    one = '{"name": "f", "arguments": {"a": 1}}'
    for text in (one, f"[{one}]", f"```json\n{one}\n```", f"<think>x</think>\n\n{one}"):
        assert parse(text, Format.JSON).calls == (Call("f", {"a": 1}),)
    assert parse(f"see {one}", Format.JSON).calls == ()


def test_detect_format() -> None:
    assert detect_format("<tool_call><function=x>") is Format.QWEN3_CODER
    assert detect_format("<tool_call>") is Format.HERMES
    assert detect_format("<|python_tag|>") is Format.LLAMA3_JSON


_FRAGMENTS = [
    '{"name": "f", "arguments": {"a": ',
    "}}",
    '"',
    "\\",
    "\n",
    "{",
    "[",
    "1e999",
    "NaN",
    "<|python_tag|>",
    ";",
    "x",
]
PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        *_FRAGMENTS,
    ]
)


@given(
    st.lists(PIECES | st.text(max_size=4), max_size=14).map("".join),
    st.sampled_from(list(Format)),
    st.booleans(),
    st.booleans(),
)
def test_nothing_raises_and_nothing_is_lost(text: str, form: Format, thinking: bool, truncated: bool) -> None:
    parsed = parse(text, form, thinking=thinking, truncated=truncated, tools=TOOLS)
    message = message_of(parsed, ["id"] * len(parsed.calls))
    json.dumps(message).encode()
    if form is Format.HERMES and "<tool_call>" in parsed.content and "<think>" not in text:
        assert parsed.errors, "a call that stays in the content must be reported"


@pytest.mark.parametrize("form", [Format.HERMES, Format.QWEN3_CODER])
@pytest.mark.parametrize(
    "piece", ["\n<function=f>", "<function=f>\n<parameter=a>\n1\n</parameter>\n", "<tool_call>\n{"]
)
def test_a_model_in_a_loop_gives_errors_no_longer_than_its_text(piece: str, form: Format) -> None:
    parsed = parse(piece * 300, form)
    assert not parsed.calls
    assert sum(len(error.text) for error in parsed.errors) <= len(piece) * 300


@given(st.text("ab", max_size=20), st.lists(st.tuples(st.sampled_from(["a", "ab", "bb"]), st.integers(0, 21))))
def test_what_was_found_once_is_found_again(text: str, asked: list[tuple[str, int]]) -> None:
    finder = Finder(text)
    assert [finder.find(*ask) for ask in asked] == [text.find(*ask) for ask in asked]


@pytest.mark.parametrize("form", [Format.JSON, Format.LLAMA3_JSON])
def test_an_answer_in_json_that_names_no_tool_is_no_call(form: Format) -> None:
    tools = [{"type": "function", "function": {"name": "ls"}}]
    for text in ('{"name": "Bob", "age": 3}', '[{"name": "Bob"}]', '{"name": {"first": "Bob"}}', "[]"):
        parsed = parse(text, form, tools=tools)
        assert (parsed.calls, parsed.errors, parsed.content) == ((), (), text)
    assert [call.name for call in parse('{"name": "ls"}', form, tools=tools).calls] == ["ls"]
    assert [call.name for call in parse('{"name": "x", "parameters": {}}', form, tools=tools).calls] == ["x"]
