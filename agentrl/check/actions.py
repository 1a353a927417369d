"""What a policy may say: sensible at random, and odd on purpose."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from agentrl.tool import Tool
from agentrl.types import Message

_WORDS = ("yes", "no", "A", "left", "hello", "x = 3", "\\boxed{7}", "0.5", "1/2", "the answer is 12", "I do not know")


def said(text: str) -> Message:
    """An answer without calls."""
    return {"role": "assistant", "content": text}


def called(name: str, arguments: Any, identity: str = "call_0", text: str | None = None) -> Message:
    """An answer with one call; `arguments` that are no text are written as JSON."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": identity, "type": "function", "function": {"name": name, "arguments": written}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def random_action(generator: random.Random, tools: Sequence[Tool]) -> Message:
    """A short answer, or a call that fits its tool's schema."""
    if tools and generator.random() < 0.6:
        chosen = generator.choice(tools)
        arguments = sample(chosen.schema["function"].get("parameters", {}), generator)
        return called(chosen.name, arguments, f"call_{generator.randrange(10**6)}")
    if generator.random() < 0.5:
        return said(str(generator.randint(0, 20)))
    return said(generator.choice(_WORDS))


def sample(schema: Any, generator: random.Random, depth: int = 0) -> Any:
    """A value that a JSON schema describes; an empty text where it says nothing of use."""
    if not isinstance(schema, dict) or depth > 4:
        return ""
    if schema.get("enum"):
        return generator.choice(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return sample(generator.choice(options), generator, depth + 1)
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        wanted = set(schema.get("required", ()))
        return {
            name: sample(inner, generator, depth + 1)
            for name, inner in properties.items()
            if name in wanted or generator.random() < 0.5
        }
    if kind == "array":
        return [sample(schema.get("items"), generator, depth + 1) for _ in range(generator.randint(0, 2))]
    low, high = schema.get("minimum", 0), schema.get("maximum", 20)
    plain: dict[Any, Any] = {
        "integer": lambda: generator.randint(int(low), int(high)),
        "number": lambda: round(generator.uniform(low, high), 2),
        "boolean": lambda: generator.random() < 0.5,
        "null": lambda: None,
    }
    return plain[kind]() if kind in plain else generator.choice(("a", "1 + 1", "hello", ""))


def odd_actions(tools: Sequence[Tool]) -> list[tuple[str, Message]]:
    """Answers that no author expects and every policy gives one day, each with its name."""
    odd = [
        ("an empty answer", said("")),
        ("an answer without content", {"role": "assistant"}),
        ("content None", {"role": "assistant", "content": None}),
        ("blanks and line breaks", said(" \n\t\n ")),
        ("unicode", said("北京 😀 \u202e ½ ² é ٣")),
        ("a number of 5,000 digits", said("9" * 5000)),
        ("nan", said("nan")),
        ("not a number", said("-inf")),
        ("broken JSON", said('{"answer": [1, 2')),
        ("control tokens", said("<|im_end|>\n<|im_start|>user\nhi")),
        ("unbalanced brackets", said("((((" * 50 + "\\boxed{" * 20)),
        ("100,000 characters", said("spam and " * 12_000)),
        ("reasoning without an answer", {"role": "assistant", "content": "", "reasoning_content": "hm"}),
    ]
    if not tools:
        return [*odd, ("a call where there are no tools", called("no_such_tool", {}))]
    name = tools[0].name
    odd += [
        ("a call of an unknown tool", called("no_such_tool", {})),
        ("arguments that are no JSON", called(name, "{'a': ")),
        ("arguments that are a list", called(name, "[1]")),
        ("empty arguments", called(name, "")),
        ("unknown arguments", called(name, {"no_such_argument": 1})),
        ("a call without an id", {**called(name, {}), "tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}),
    ]
    for tool in tools:
        wrong = {key: {"un": "expected"} for key in tool.schema["function"].get("parameters", {}).get("properties", {})}
        odd.append((f"arguments of wrong types for {tool.name}", called(tool.name, wrong)))
    two = called(name, {}, "call_a")["tool_calls"] + called("no_such_tool", {}, "call_b")["tool_calls"]
    return [*odd, ("two calls and a text", {"role": "assistant", "content": "both", "tool_calls": two})]
