"""Chat messages in one form: what clients write in many ways, made comparable and renderable.

The canonical form has `role`, `content` (always a string), and where they apply `reasoning_content`, `name`,
`tool_call_id` and `tool_calls`, whose arguments are objects and not JSON strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ContractError
from agentrl.types import Message

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def canonical(message: object, at: int = 0) -> Message:
    """The canonical form of `messages[at]`; ContractError says what is wrong with it."""
    if not isinstance(message, Mapping):
        raise ContractError(f"messages[{at}] is a {type(message).__name__}; expected an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ContractError(f"messages[{at}] has role {role!r}; expected one of {', '.join(sorted(ROLES))}")
    clean: Message = {"role": role, "content": flat_text(message.get("content"), at)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key)
        if value is None and key == "reasoning_content" and isinstance(message.get("reasoning"), str):
            value = message["reasoning"]  # its newer name, in vLLM and elsewhere
        if value is None or (key == "reasoning_content" and role != "assistant"):
            continue
        if not isinstance(value, str):
            raise ContractError(f"messages[{at}].{key} is {type(value).__name__}; expected a string")
        clean[key] = encodable(value)
    if message.get("function_call"):
        raise ContractError(f"messages[{at}] has a function_call, which tool_calls replaced: send it as one of these")
    if message.get("tool_calls"):
        if role != "assistant":
            raise ContractError(f"messages[{at}] has tool_calls but role {role!r}; only the assistant calls tools")
        if not isinstance(message["tool_calls"], (list, tuple)):
            raise ContractError(f"messages[{at}].tool_calls is {type(message['tool_calls']).__name__}; expected a list")
        clean["tool_calls"] = [_call(call, at) for call in message["tool_calls"]]
    return clean


def flat_text(content: object, at: int = 0) -> str:
    """A message's content as one string: None is empty, text parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content)
    if not isinstance(content, (list, tuple)):
        raise ContractError(
            f"messages[{at}].content is {type(content).__name__}; expected text or a list of text parts"
        )
    texts = []
    for part in content:
        text = (
            part
            if isinstance(part, str)
            else part.get("text", part.get("refusal"))
            if isinstance(part, Mapping)
            else None
        )
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ContractError(f"messages[{at}].content has a part of type {kind!r}; only text can be rendered")
        texts.append(text)
    return encodable("".join(texts))


def encodable(text: str) -> str:
    """The text with lone surrogates (undecodable bytes of a tool's output) replaced, so that it can be tokenised."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _call(call: object, at: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ContractError(
            f"messages[{at}].tool_calls holds {call!r:.200}; expected id, type and function with a name"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    clean = {"type": "function", "function": {"name": encodable(function["name"]), "arguments": arguments or {}}}
    return {"id": str(call["id"]), **clean} if call.get("id") is not None else clean


def parsed_arguments(text: str) -> Any:
    """The object that a JSON string of arguments holds; the text itself where it holds none."""
    try:
        value = json.loads(text, strict=False) if text.strip() else {}
    except (ValueError, RecursionError):
        return encodable(text)
    return value if isinstance(value, dict) else encodable(text)


def same(given: Message, known: Message, *, sampled: bool) -> bool:
    """Whether two canonical messages are the same to a reader.

    Clients may drop the reasoning of a `sampled` message (most frameworks do): that is no edit.
    """
    if given == known:
        return True
    if not sampled or "reasoning_content" in given or "reasoning_content" not in known:
        return False
    return given == {key: value for key, value in known.items() if key != "reasoning_content"}


def copied(value: Any) -> Any:
    """A copy of plain data that later edits in place cannot reach; strings are shared."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return value
