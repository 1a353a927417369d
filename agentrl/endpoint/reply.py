"""What the endpoint answers, in OpenAI's form: as the client's own objects for the direct session, as plain data for
HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion import Choice as OpenAIChoice
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import Function
from pydantic import BaseModel

from agentrl.endpoint.parse import Call, CallError, Parsed
from agentrl.engine.types import Completion
from agentrl.types import Message

_M = TypeVar("_M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer. `finish` is OpenAI's finish_reason; `message` is what the client gets and may send back."""

    message: Message
    finish: str
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole chat completion."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int


def before_stop(text: str, completion: Completion, stops: Sequence[str]) -> str:
    """The text without the stop string that ended it and what the last token holds after that: no part of the answer,
    though its tokens stay recorded. Of several in one token the first counts, whichever the engine names."""
    if not isinstance(completion.matched, str):
        return text
    return text[: min((at for stop in (completion.matched, *stops) if (at := text.find(stop)) >= 0), default=len(text))]


def message_of(parsed: Parsed, ids: Sequence[str]) -> Message:
    """The assistant's message, its calls named by `ids`.

    A call that could not be read stays in `content` and is listed in `tool_call_errors`.
    """
    content = parsed.content
    message: Message = {"role": "assistant", "content": None if parsed.calls and not content.strip() else content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [call_of(call, name) for call, name in zip(parsed.calls, ids, strict=True)]
    if parsed.errors:
        message["tool_call_errors"] = [_error(error) for error in parsed.errors]
    return message


def call_of(call: Call, name: str) -> dict[str, Any]:
    """A call in OpenAI's form, with `name` as its id."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _error(error: CallError) -> dict[str, str]:
    return {"text": error.text, "error": error.reason}


def to_json(reply: Reply) -> dict[str, Any]:
    """The body of an HTTP answer."""
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [
            {
                "index": i,
                "message": choice.message,
                "finish_reason": choice.finish,
                "logprobs": None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None},
            }
            for i, choice in enumerate(reply.choices)
        ],
        "usage": usage(reply),
    }


def to_text_json(reply: Reply) -> dict[str, Any]:
    """The body of an HTTP answer to a text completion."""
    return {
        "id": reply.id,
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [
            {
                "index": i,
                "text": choice.message["content"],
                "finish_reason": choice.finish,
                "logprobs": None if choice.logprobs is None else text_logprobs(choice.logprobs),
            }
            for i, choice in enumerate(reply.choices)
        ],
        "usage": usage(reply),
    }


def text_logprobs(rows: Sequence[Mapping[str, Any]], at: int = 0) -> dict[str, Any]:
    """Log-probs in the form of text completions; the first token's text begins at `at`."""
    starts = [at]
    for row in rows:
        starts.append(starts[-1] + len(row["token"]))
    return {
        "tokens": [row["token"] for row in rows],
        "token_logprobs": [row["logprob"] for row in rows],
        "top_logprobs": _text_top(rows),
        "text_offset": starts[:-1],
    }


def _text_top(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]] | None:
    if not any(row["top_logprobs"] for row in rows):
        return None
    # Several tokens may have the same text (pieces of a character): the likeliest counts, as lists are best first.
    return [{top["token"]: top["logprob"] for top in reversed(row["top_logprobs"])} for row in rows]


def usage(reply: Reply) -> dict[str, int]:
    """Token counts."""
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def to_openai(reply: Reply) -> ChatCompletion:
    """The client's own result type, built without validating what is known to be valid."""
    return _build(
        ChatCompletion,
        id=reply.id,
        object="chat.completion",
        created=reply.created,
        model=reply.model,
        choices=[_choice(i, choice) for i, choice in enumerate(reply.choices)],
        usage=_build(CompletionUsage, **usage(reply)),
    )


def _choice(index: int, choice: Choice) -> OpenAIChoice:
    message = dict(choice.message)
    if "tool_calls" in message:
        message["tool_calls"] = [
            _build(
                ChatCompletionMessageFunctionToolCall,
                id=call["id"],
                type="function",
                function=_build(Function, **call["function"]),
            )
            for call in message["tool_calls"]
        ]
    logprobs = None
    if choice.logprobs is not None:
        logprobs = ChoiceLogprobs.model_validate({"content": choice.logprobs, "refusal": None})
    return _build(
        OpenAIChoice,
        index=index,
        finish_reason=choice.finish,
        message=_build(ChatCompletionMessage, **message),
        logprobs=logprobs,
    )


def _build(kind: type[_M], **values: Any) -> _M:
    # What pydantic's own constructor does, without its walk over the fields' definitions and aliases, and without the
    # client's override, which walks all nested values once more.
    made = kind.__new__(kind)
    fields, defaults = _fields(kind)
    extra = {name: values.pop(name) for name in values.keys() - fields}
    object.__setattr__(made, "__dict__", {**defaults, **values})
    object.__setattr__(made, "__pydantic_fields_set__", {*values, *extra})
    object.__setattr__(made, "__pydantic_extra__", extra)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


@cache
def _fields(kind: type[BaseModel]) -> tuple[frozenset[str], dict[str, Any]]:
    """The names of a model's fields, and the defaults of those that have one."""
    fields = kind.model_fields
    return frozenset(fields), {name: field.get_default() for name, field in fields.items() if not field.is_required()}
