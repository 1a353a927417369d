"""Streamed answers: OpenAI's chunks, made from what is certain of the text so far.

Text is held back while it may still become something else: in a call that is not closed yet, at a piece of a tag or of
a stop string, at half a character, and while it is only blanks. What is sent is always a prefix of the final message;
calls come whole, each as soon as it is closed. Log-probs come with the tokens, whether or not their text is held back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openai.types.chat import ChatCompletionChunk

from agentrl.endpoint.parse import Format, settled
from agentrl.endpoint.render import Prompt
from agentrl.endpoint.replay import Running
from agentrl.endpoint.reply import Reply, call_of, text_logprobs, usage
from agentrl.endpoint.request import ChatRequest
from agentrl.errors import EngineError

if TYPE_CHECKING:
    from agentrl.endpoint.session import Progress, Session

_TAGGED = (Format.HERMES, Format.QWEN3_CODER)
_TAGS = ("<tool_call>", "<think>", "</think>")
_WHOLE_ANSWER = ("{", "[", "`", "<")
_BEAT = 0.02  # seconds between looks at a running generation, so that fast engines do not cost a chunk a token


Parts = AsyncGenerator[dict[str, Any], None]


class Streaming(Running):
    """A call that tells its readers what was sampled so far."""

    def __init__(self, session: Session, request: ChatRequest, timeout: float | None = None) -> None:
        self.session = session
        self.request = request
        self.latest: dict[int, Progress] = {}
        self._readers: set[asyncio.Event] = set()
        super().__init__(session.complete(request, self._told, timeout))
        self.task.add_done_callback(lambda _: self._wake())

    def _told(self, index: int, progress: Progress) -> None:
        self.latest[index] = progress
        self._wake()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.set()

    async def chunks(self) -> Parts:
        """The answer from its beginning, in OpenAI's form."""
        text = self.request.prompt is not None
        out = _TextChunks(self.session, self.request) if text else _Chunks(self.session, self.request)
        seen: dict[int, Progress] = {}
        wake = asyncio.Event()
        wake.set()
        self._readers.add(wake)
        try:
            while not self.task.done():
                await wake.wait()  # ends with the task, which has the call's deadline
                wake.clear()
                if self.task.done():
                    break
                for index, progress in list(self.latest.items()):
                    if seen.get(index) is not progress:
                        seen[index] = progress
                        for chunk in out.progress(index, progress):
                            yield chunk
                await asyncio.sleep(_BEAT)
            for chunk in out.end(await self.result()):
                yield chunk
        finally:
            self._readers.discard(wake)


class DirectStream:
    """What `create(stream=True)` returns from the direct session: an asynchronous iterator of `ChatCompletionChunk`."""

    def __init__(self, session: Session, request: ChatRequest, timeout: float | None) -> None:
        self._asked = (session, request, timeout)
        self._running: Streaming | None = None
        self._parts: Parts | None = None

    def __aiter__(self) -> DirectStream:
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        if self._parts is None:
            self._running = Streaming(*self._asked)
            self._parts = self._running.chunks()
        try:
            return ChatCompletionChunk.model_validate(await anext(self._parts))
        except asyncio.CancelledError:
            await self.close()
            raise

    async def __aenter__(self) -> DirectStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what still runs."""
        if self._running is not None:
            self._running.task.cancel()
        if self._parts is not None:
            await self._parts.aclose()


@dataclass(slots=True)
class _Sent:
    """What a reader has of a choice."""

    reasoning: str = ""
    content: str = ""
    calls: int = 0
    tokens: int = 0
    token_text: int = 0


class _Chunks:
    """One reader's view of a call."""

    kind = "chat.completion.chunk"

    def __init__(self, session: Session, request: ChatRequest) -> None:
        self.request = request
        self._session = session
        self._form = session.format_of(request)
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": session.model_name,
        }
        self._sent: dict[int, _Sent] = {}

    def progress(self, index: int, progress: Progress) -> list[dict[str, Any]]:
        completion, prompt, number = progress
        said = prompt.opened + self._session.text_of(completion)[1]
        sure = max(self.certain(said, prompt), len(prompt.opened))
        parsed = self._session.read(self.request, prompt, said[len(prompt.opened) : sure], True)
        if parsed.errors and not parsed.calls:
            return []  # a call that was asked for and is not closed yet
        ids = self._session.call_ids(number, index, len(parsed.calls))
        made = self._text(index, parsed.reasoning or "", parsed.content if parsed.content.strip() else "")
        made += self._calls(index, [call_of(call, name) for call, name in zip(parsed.calls, ids, strict=True)])
        if made and self.request.logprobs:
            rows = self._session.logprobs(completion, self._sent[index].tokens)
            made[-1]["choices"][0]["logprobs"] = self._counted(self._sent[index], rows)
        return made

    def end(self, reply: Reply) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for index, choice in enumerate(reply.choices):
            message = choice.message
            made += self._text(index, message.get("reasoning_content") or "", message.get("content") or "")
            made += self._calls(index, message.get("tool_calls", []))
            if "tool_call_errors" in message:
                made.append(self._chunk(index, {"tool_call_errors": message["tool_call_errors"]}))
            made.append(self._chunk(index, {}, choice.finish))
            if choice.logprobs is not None:
                rest = choice.logprobs[self._sent[index].tokens :]
                made[-1]["choices"][0]["logprobs"] = self._counted(self._sent[index], rest)
        if self.request.usage:
            made.append({**self._head, "choices": [], "usage": usage(reply)})
        return made

    def certain(self, text: str, prompt: Prompt) -> int:
        """How much of the text is final."""
        return certain(text, self._form, self.request.sampling.stop, thinking=prompt.thinking)

    def delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """What a chunk adds, in the dialect's form."""
        return {"delta": delta}

    def logprobs(self, rows: list[dict[str, Any]], at: int) -> dict[str, Any]:
        """Log-probs of new tokens, whose text begins at `at`, in the dialect's form."""
        return {"content": rows, "refusal": None}

    def _counted(self, sent: _Sent, rows: list[dict[str, Any]]) -> dict[str, Any]:
        at = sent.token_text
        sent.tokens += len(rows)
        sent.token_text += sum(len(row["token"]) for row in rows)
        return self.logprobs(rows, at)

    def _calls(self, index: int, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        sent = self._sent[index]
        new = range(sent.calls, len(calls))
        sent.calls = max(sent.calls, len(calls))
        return [self._chunk(index, {"tool_calls": [{"index": i, **calls[i]}]}) for i in new]

    def _text(self, index: int, reasoning: str, content: str) -> list[dict[str, Any]]:
        made = []
        sent = self._sent.get(index)
        if sent is None:
            sent = self._sent[index] = _Sent()
            made.append(self._chunk(index, {"role": "assistant", "content": ""}))
        if not (reasoning.startswith(sent.reasoning) and content.startswith(sent.content)):
            raise EngineError(f"the engine changed text that was streamed already: {sent.content!r:.80}")
        if len(reasoning) > len(sent.reasoning):
            made.append(self._chunk(index, {"reasoning_content": reasoning[len(sent.reasoning) :]}))
        if len(content) > len(sent.content):
            made.append(self._chunk(index, {"content": content[len(sent.content) :]}))
        sent.reasoning, sent.content = reasoning, content
        return made

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **self.delta(delta), "finish_reason": finish, "logprobs": None}
        return {**self._head, "choices": [choice]}


class _TextChunks(_Chunks):
    """The same for text completions, in which tags mean nothing."""

    kind = "text_completion"

    def certain(self, text: str, prompt: Prompt) -> int:
        return certain(text, None, self.request.sampling.stop, thinking=False)

    def delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}

    def logprobs(self, rows: list[dict[str, Any]], at: int) -> dict[str, Any]:
        return text_logprobs(rows, at)


def certain(
    text: str,
    form: Format | None,
    stops: Sequence[str] = (),
    *,
    thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> int:
    """How much of a growing text cannot change its meaning any more; without a `form`, only stop strings have one."""
    if form in (Format.LLAMA3_JSON, Format.JSON):
        answer = _after_thought(text, thinking)
        if not text[answer:].strip() or text[answer:].lstrip().startswith(_WHOLE_ANSWER):
            return answer
    end = len(text.rstrip("\ufffd"))
    thought = text.find("<think>", 1) if form is not None else -1
    if thought >= 0 and text[:thought].strip():
        end = min(end, thought)
    for tag in (*_tags(form), *stops):
        if tag in stops and (found := text.find(tag)) >= 0:
            end = min(end, found)
        for size in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:size]):
                end = min(end, len(text) - size)
                break
    return settled(text[:end], form, thinking=thinking, tools=tools) if form in _TAGGED else end


def _tags(form: Format | None) -> tuple[str, ...]:
    if form is None:
        return ()
    return (*_TAGS, "<function=") if form is Format.QWEN3_CODER else _TAGS


def _after_thought(text: str, thinking: bool) -> int:
    if not (thinking or text.lstrip().startswith("<think>")):
        return 0
    end = text.find("</think>")
    return 0 if end < 0 else end + len("</think>")
