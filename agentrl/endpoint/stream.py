"""Streamed answers: OpenAI's chunks, made from what is certain of the text so far.

Text is held back while it may still become something else: from an opening `<tool_call>` on, at a piece of a tag or of
a stop string, at half a character, and while it is only blanks. What is sent is always a prefix of the final message,
and calls come whole.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from openai.types.chat import ChatCompletionChunk

from agentrl.endpoint.parse import Format, parse
from agentrl.endpoint.reply import Reply, usage
from agentrl.endpoint.request import ChatRequest
from agentrl.engine.types import Completion
from agentrl.errors import EngineError
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.endpoint.session import Session

_TAGS = ("<tool_call>", "<think>", "</think>")
_WHOLE_ANSWER = ("{", "[", "`", "<")
_BEAT = 0.02  # seconds between looks at a running generation, so that fast engines do not cost a chunk a token


Parts = AsyncGenerator[dict[str, Any], None]


async def chunks(session: Session, request: ChatRequest, timeout: float | None = None) -> Parts:
    """The answer as chunks, in OpenAI's form. Closing the iterator aborts the generation."""
    latest: dict[int, tuple[Completion, bool]] = {}
    wake = asyncio.Event()

    def told(index: int, completion: Completion, thinking: bool) -> None:
        latest[index] = (completion, thinking)
        wake.set()

    task = asyncio.ensure_future(session.complete(request, told, timeout))
    task.add_done_callback(lambda _: wake.set())
    out = _Chunks(session, request)
    try:
        while not task.done():
            await wake.wait()  # ends with the task, which has the call's deadline
            wake.clear()
            if task.done():
                break
            for index, (completion, thinking) in latest.items():
                for chunk in out.progress(index, completion, thinking):
                    yield chunk
            latest.clear()
            await asyncio.sleep(_BEAT)
        for chunk in out.end(task.result()):
            yield chunk
    finally:
        task.cancel()


class DirectStream:
    """What `create(stream=True)` returns from the direct session: an asynchronous iterator of `ChatCompletionChunk`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __aiter__(self) -> DirectStream:
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        return ChatCompletionChunk.model_validate(await anext(self._parts))

    async def __aenter__(self) -> DirectStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what still runs."""
        await self._parts.aclose()


class _Chunks:
    def __init__(self, session: Session, request: ChatRequest) -> None:
        self._session = session
        self._request = request
        self._form = session.format_of(request)
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": session.model_name,
        }
        self._sent: dict[int, dict[str, str]] = {}

    def progress(self, index: int, completion: Completion, thinking: bool) -> list[dict[str, Any]]:
        text = self._session.text_of(completion)[1]
        sure = text[: _certain(text, self._form, self._request.sampling.stop)]
        parsed = parse(sure, self._form, thinking=thinking, truncated=True)
        return self._grow(index, parsed.reasoning or "", parsed.content if parsed.content.strip() else "")

    def end(self, reply: Reply) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for index, choice in enumerate(reply.choices):
            message = choice.message
            made += self._grow(index, message.get("reasoning_content") or "", message.get("content") or "")
            made += self._last(index, message)
            logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
            made.append(self._chunk(index, {}, choice.finish, logprobs))
        if self._request.usage:
            made.append({**self._head, "choices": [], "usage": usage(reply)})
        return made

    def _last(self, index: int, message: Message) -> list[dict[str, Any]]:
        made = [
            self._chunk(index, {"tool_calls": [{"index": i, **call}]})
            for i, call in enumerate(message.get("tool_calls", []))
        ]
        if "tool_call_errors" in message:
            made.append(self._chunk(index, {"tool_call_errors": message["tool_call_errors"]}))
        return made

    def _grow(self, index: int, reasoning: str, content: str) -> list[dict[str, Any]]:
        made = []
        sent = self._sent.get(index)
        if sent is None:
            sent = self._sent[index] = {"reasoning_content": "", "content": ""}
            made.append(self._chunk(index, {"role": "assistant", "content": ""}))
        for name, text in (("reasoning_content", reasoning), ("content", content)):
            if not text.startswith(sent[name]):
                raise EngineError(f"the engine changed text that was streamed already: {sent[name]!r:.80}")
            if len(text) > len(sent[name]):
                made.append(self._chunk(index, {name: text[len(sent[name]) :]}))
                sent[name] = text
        return made

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return {**self._head, "choices": [choice]}


def _certain(text: str, form: Format, stops: tuple[str, ...]) -> int:
    """How much of the text cannot change its meaning any more."""
    if form in (Format.LLAMA3_JSON, Format.JSON) and (not text.strip() or text.lstrip().startswith(_WHOLE_ANSWER)):
        return 0
    end = len(text.rstrip("\ufffd"))
    opened = text.find("<tool_call>") if form in (Format.HERMES, Format.QWEN3_CODER) else -1
    if opened >= 0:
        end = min(end, opened)
    thought = text.find("<think>", 1)
    if thought >= 0 and text[:thought].strip():
        end = min(end, thought)
    for tag in (*_TAGS, *stops):
        if tag in stops and (found := text.find(tag)) >= 0:
            end = min(end, found)
        for size in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:size]):
                end = min(end, len(text) - size)
                break
    return end
