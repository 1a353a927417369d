"""Sampled text to reasoning, content and tool calls. Whatever a model writes is a value here: nothing raises.

A call that cannot be read stays in the content as it was written and is listed in `errors`. Control characters inside
JSON strings are accepted; of equal keys the last counts; numbers that are not finite, lone surrogates and nesting
deeper than 64 are errors. Arguments given as a JSON string are decoded once. Tags count inside a code fence too. A
complete call whose closing tag is missing counts where the turn ended by itself, and is an error where it was cut.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from agentrl.endpoint.lenient import Bad, Finder, decode, skip
from agentrl.endpoint.values import schema_of, typed

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAMED = "<function="
_THINK, _THOUGHT = "<think>", "</think>"


class Format(enum.StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, also Qwen2.5 and Qwen3."""
    QWEN3_CODER = "qwen3_coder"
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`."""
    LLAMA3_JSON = "llama3_json"
    """The whole answer is `{"name": …, "parameters": {…}}`, several joined by `;`, after `<|python_tag|>` or not."""
    JSON = "json"
    """The whole answer is one such object or an array of them."""
    NONE = "none"


class Call(NamedTuple):
    """A tool call that could be read."""

    name: str
    arguments: dict[str, Any]


class CallError(NamedTuple):
    """A tool call that could not be read: its text as written, and why."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled turn in parts. `content` is all text outside reasoning and calls; `before` and `after` are its parts
    on both sides of the calls."""

    reasoning: str | None
    content: str
    calls: tuple[Call, ...] = ()
    errors: tuple[CallError, ...] = ()
    before: str = ""
    after: str = ""


def detect_format(template: str) -> Format:
    """The format that a chat template teaches the model."""
    if "<function=" in template:
        return Format.QWEN3_CODER
    if _OPEN in template:
        return Format.HERMES
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return Format.LLAMA3_JSON
    return Format.HERMES


def parse(
    text: str,
    form: Format,
    *,
    thinking: bool = False,
    truncated: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Parsed:
    """Read a sampled turn.

    `thinking`: the prompt had already opened `<think>`. `truncated`: cut by a limit. `tools` give Qwen3-Coder's values
    their types.
    """
    scan = _Scan(text, form, truncated, tools)
    if thinking:
        scan.opened()
    if form in (Format.LLAMA3_JSON, Format.JSON):
        scan.whole()
    else:
        scan.tagged()
    return scan.result()


def settled(text: str, form: Format, *, thinking: bool, tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """How much of a tagged turn that still grows is read the same whatever follows: all of it, up to the first call
    that is not complete or wrong."""
    scan = _Scan(text, form, True, tools)
    if thinking:
        scan.opened()
    return scan.tagged(growing=True)


def first_call(parsed: Parsed) -> Parsed:
    """The same turn where parallel calls are switched off: the calls after the first count as errors."""
    reason = "parallel_tool_calls is false: only the first call of a turn counts"
    surplus = [CallError(json.dumps(call._asdict(), ensure_ascii=False), reason) for call in parsed.calls[1:]]
    return replace(parsed, calls=parsed.calls[:1], errors=(*parsed.errors, *surplus)) if surplus else parsed


@dataclass(slots=True)
class _Scan:
    text: str
    form: Format
    truncated: bool
    tools: Sequence[Mapping[str, Any]]
    at: int = 0
    reasoning: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    errors: list[CallError] = field(default_factory=list)
    spoke: bool = False
    finder: Finder = field(init=False)

    def __post_init__(self) -> None:
        self.finder = Finder(self.text)

    def result(self) -> Parsed:
        before, after = "".join(self.before), "".join(self.after)
        thoughts = [t for t in (part.strip("\n") for part in self.reasoning) if t]
        reasoning = "\n".join(thoughts) if self.reasoning else None
        return Parsed(reasoning, before + after, tuple(self.calls), tuple(self.errors), before, after)

    def say(self, text: str) -> None:
        (self.after if self.calls else self.before).append(text)
        self.spoke = self.spoke or (not self.calls and bool(text.strip()))

    def opened(self) -> None:
        """The prompt opened `<think>`; some models write it again, which is no part of their reasoning."""
        lead = len(self.text) - len(self.text.lstrip("\n"))
        self.think(lead + len(_THINK) if self.text.startswith(_THINK, lead) else 0)

    def think(self, start: int) -> None:
        end = self.finder.find(_THOUGHT, start)
        self.reasoning.append(self.text[start:] if end < 0 else self.text[start:end])
        self.at = len(self.text) if end < 0 else end + len(_THOUGHT)
        if end >= 0 and not self.spoke:
            # The blank lines around the reasoning belong to the format, not to the answer; what stands before a call
            # may have been streamed by now.
            if not self.calls:
                self.before.clear()
            while self.text.startswith("\n", self.at):
                self.at += 1

    def tagged(self, growing: bool = False) -> int:
        held = -1  # where the calls begin of which each is ended by the next one's tag alone
        while self.at < len(self.text):
            call, bare = self._next_call()
            think = self.finder.find(_THINK, self.at)
            if think >= 0 and (call < 0 or think < call) and self._is_thought(think):
                self.say(self.text[self.at : think])
                self.think(think + len(_THINK))
                continue
            if call < 0:
                break
            self.say(self.text[self.at : call])
            good = self._bare_call(call) if bare else self._call_at(call)
            begun = call if held < 0 else held
            if growing and not good:
                return begun
            if growing and bare and _CLOSE.startswith(self.text[skip(self.text, self.at) :]):
                return self.at  # a closing tag may still come, with the blanks before it
            held = -1 if bare or self.text.endswith(_CLOSE, call, self.at) else begun
        self.say(self.text[self.at :])
        self.at = len(self.text)
        return self.at

    def _is_thought(self, at: int) -> bool:
        # An opening tag that is never closed is reasoning only where the turn starts with it; else it is talk about
        # the tag.
        leading = not (self.reasoning or self.calls or self.spoke or self.text[self.at : at].strip())
        return leading or self.finder.find(_THOUGHT, at) >= 0

    def _next_call(self) -> tuple[int, bool]:
        """Where the next call begins, and whether without its tag: Qwen3-Coder often leaves that out."""
        tagged = self.finder.find(_OPEN, self.at) if self.form is not Format.NONE else -1
        bare = self.finder.find(_NAMED, self.at) if self.form is Format.QWEN3_CODER else -1
        return (bare, True) if bare >= 0 and (tagged < 0 or bare < tagged) else (tagged, False)

    def _bare_call(self, start: int) -> bool:
        try:
            call, self.at = self._coder_call(start)
        except Bad as bad:
            # At the beginning of a line it was meant as a call; elsewhere it is talk about one.
            self.at = start + len(_NAMED)
            if not self.text[self.text.rfind("\n", 0, start) + 1 : start].strip():
                following, _ = self._next_call()
                self.errors.append(CallError(self.text[start : following if following >= 0 else None], str(bad)))
            self.say(_NAMED)
            return False
        self.calls.append(call)
        close = skip(self.text, self.at)
        if self.text.startswith(_CLOSE, close):
            self.at = close + len(_CLOSE)
        return True

    def _call_at(self, start: int) -> bool:
        inside = start + len(_OPEN)
        try:
            found, end = (self._coder if self.form is Format.QWEN3_CODER else self._hermes)(inside)
        except Bad as bad:
            close = self.finder.find(_CLOSE, inside)
            again = self.finder.find(_OPEN, inside)
            end = len(self.text) if close < 0 else close + len(_CLOSE)
            if 0 <= again < end:
                end = again
            raw = self.text[start:end]
            self.errors.append(CallError(raw, str(bad)))
            self.say(raw)
            self.at = end
            return False
        self.calls += found
        self.at = end
        return True

    def _hermes(self, at: int) -> tuple[list[Call], int]:
        found: list[Call] = []
        while True:
            at = skip(self.text, at)
            if found and self.text.startswith(_CLOSE, at):
                return found, at + len(_CLOSE)
            if found and (self.text.startswith(_OPEN, at) or (at == len(self.text) and not self.truncated)):
                return found, at
            value, at = decode(self.text, at)
            found += [_call(item) for item in (value if isinstance(value, list) else [value])]

    def _coder(self, at: int) -> tuple[list[Call], int]:
        found: list[Call] = []
        while True:
            at = skip(self.text, at)
            if found and self.text.startswith(_CLOSE, at):
                return found, at + len(_CLOSE)
            if found and (self.text.startswith(_OPEN, at) or (at == len(self.text) and not self.truncated)):
                return found, at
            call, at = self._coder_call(at)
            found.append(call)

    def _coder_call(self, at: int) -> tuple[Call, int]:
        head = _FUNCTION.match(self.text, at)
        if head is None:
            raise Bad("expected <function=NAME>")
        name, at = head.group(1).strip(), head.end()
        schema = schema_of(self.tools, name)
        arguments: dict[str, Any] = {}
        while True:
            at = skip(self.text, at)
            if self.text.startswith("</function>", at):
                return Call(name, arguments), at + len("</function>")
            key = _PARAMETER.match(self.text, at)
            if key is None:
                raise Bad(f"expected <parameter=KEY> or </function> in the call of {name}")
            end = self.finder.search(_PARAMETER_END, key.end())
            if end < 0:
                raise Bad(f"parameter {key.group(1)} of {name} is not closed")
            if _PARAMETER_LINE.search(self.text, key.end(), end) and "</parameter>" not in self.text[key.end() : end]:
                raise Bad(f"parameter {key.group(1)} of {name} is not closed before the next")
            raw = self.text[key.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[key.group(1).strip()] = typed(raw, key.group(1).strip(), schema)
            at = end + len("</parameter>")

    def whole(self) -> None:
        if not self.reasoning:
            lead = skip(self.text, self.at)
            if self.text.startswith(_THINK, lead):
                self.think(lead + len(_THINK))
        rest, start = self.text[self.at :], self.at
        body = rest.strip()
        tagged = self.form is Format.LLAMA3_JSON and body.startswith("<|python_tag|>")
        if tagged:
            body = body.removeprefix("<|python_tag|>")
        self.at = len(self.text)
        if self.form is Format.JSON and (fence := _FENCE.match(body)) is not None:
            body = body[fence.end() :].removesuffix("```").rstrip()
        if not body.startswith(("{", "[")):
            if tagged:
                self.errors.append(CallError(rest, "expected a JSON object after <|python_tag|>"))
            self.say(self.text[start:])
            return
        left, reason = self._objects(body, tagged)
        names = ("name", *_tool_names(self.tools))
        if reason and (tagged or self.calls or any(f'"{name}"' in body for name in names)):
            # After calls that could be read, only what is left is wrong.
            self.errors.append(CallError(left if self.calls else rest, reason))
        if left:
            self.say(left if self.calls else rest)

    def _objects(self, body: str, tagged: bool) -> tuple[str, str]:
        """Read calls joined by `;`; what is left, and why it could not be read. An answer that is no call is left
        whole, without a reason."""
        at = start = 0
        while at < len(body):
            start = at
            try:
                value, at = decode(body, at)
                items = value if isinstance(value, list) else [value]
                if not (tagged or self.calls) and all(self._is_data(item) for item in items):
                    return body, ""
                found = [_call(item) for item in items]
                at = skip(body, at)
                if not body.startswith(";", at) and at < len(body):
                    raise Bad(f"text follows the call: {body[at : at + 40]!r}")
            except Bad as bad:
                return body[start:], str(bad)
            self.calls += found
            at = skip(body, at + 1)
        return "", ""

    def _is_data(self, item: Any) -> bool:
        """Whether an object without arguments names no known tool: an answer in JSON may well have a "name"."""
        if not isinstance(item, dict) or "arguments" in item or "parameters" in item or "function" in item:
            return False
        return bool(self.tools) and item.get("name") not in _tool_names(self.tools)


_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_PARAMETER_LINE = re.compile(r"\n\s*<parameter=[^>\n]+>")
_FENCE = re.compile(r"```(?:json)?\s*", re.IGNORECASE)
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "index", "function"})


def _call(value: Any) -> Call:
    if not isinstance(value, dict):
        raise Bad(f"expected an object with name and arguments, got {type(value).__name__}")
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Bad("the call has no name")
    written = value.get("arguments")
    arguments = written = value.get("parameters") if written is None else written
    if isinstance(written, str):
        arguments, end = decode(written, 0) if written.strip() else ({}, 0)
        if written[end:].strip():
            raise Bad(f"text follows the arguments of {name}")
    if arguments is None:
        if others := sorted(value.keys() - _KEYS):
            raise Bad(f"the call of {name} has no arguments, but {', '.join(others)[:100]}")
        arguments = {}
    if not isinstance(arguments, dict):
        raise Bad(f"the arguments of {name} are {type(arguments).__name__}, expected an object")
    return Call(name, arguments)


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [function.get("name") for tool in tools if isinstance(function := tool.get("function"), Mapping)]
