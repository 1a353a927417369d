"""A session without templates: bytes in, an engine's tokens out, recorded with the engine's own versions.

For tests of what stands above the endpoint; the real `Session` renders and parses as a model's template says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from openai.types.chat import ChatCompletion

from agentrl.engine.types import Engine, GenerateRequest, Sampling
from agentrl.errors import AgentRLError, LimitReached
from agentrl.rollout.session import OpenSession, SessionSpec
from agentrl.types import Context, Sampled, Segment, Trajectory


class ByteSession:
    """One trajectory: each new message is its UTF-8 bytes, each reply what `engine` sampled."""

    def __init__(self, engine: Engine, spec: SessionSpec) -> None:
        self.spec = spec
        self.closed = 0
        self.failure: AgentRLError | None = None
        self._engine = engine
        self._seen = 0
        self._marked = 0
        self._segments: list[Segment] = []

    @property
    def chat(self) -> ByteSession:
        """`chat.completions` is the session itself."""
        return self

    @property
    def completions(self) -> ByteSession:
        """See `create`."""
        return self

    @property
    def metrics(self) -> Mapping[str, float]:
        """Tokens recorded."""
        return {"tokens": float(self._length)}

    @property
    def _length(self) -> int:
        return sum(len(segment) for segment in self._segments)

    @property
    def _sampled(self) -> int:
        return sum(len(segment) for segment in self._segments if segment.logprobs is not None)

    async def create(self, *, messages: Sequence[Mapping[str, Any]], model: str, **_: Any) -> ChatCompletion:
        """Sample one reply to all messages that are new since the last call."""
        text = "".join(str(message.get("content") or "") for message in messages[self._seen :]).encode() or b"\n"
        left = self.spec.max_tokens - self._sampled
        if left <= 0:
            raise LimitReached(f"the episode's {self.spec.max_tokens} sampled tokens are used up")
        context = Segment(np.frombuffer(text, np.uint8).astype(np.int32), None, Context())
        prompt = np.concatenate([s.tokens for s in [*self._segments, context]])
        name = f"{self.spec.id}-{len(self._segments)}"
        sampling = Sampling(left, self.spec.temperature, seed=self.spec.seed)
        try:
            completion = await self._engine.generate(
                GenerateRequest(name, self.spec.id, prompt, sampling, self.spec.deadline + 5.0)
            )
        except AgentRLError as error:
            self.failure = error
            raise
        self._segments.append(context)
        for version, start, end in completion.spans:
            source = Sampled(version, self.spec.temperature)
            self._segments.append(Segment(completion.tokens[start:end], completion.logprobs[start:end], source))
        self._seen = len(messages) + 1
        content = bytes(int(token) % 256 for token in completion.tokens).decode("utf-8", "replace")
        return _reply(content, model, "length" if completion.finish == "length" else "stop")

    def marks(self) -> tuple[tuple[int, int], ...]:
        """The trajectory, where it grew."""
        grown = self._length > self._marked
        self._marked = self._length
        return ((0, self._length),) if grown else ()

    async def close(self) -> tuple[Trajectory, ...]:
        """What was recorded."""
        self.closed += 1
        await asyncio.sleep(0)
        return (Trajectory(tuple(self._segments)),) if self._segments else ()


def byte_sessions(engine: Engine) -> OpenSession:
    """Opens a `ByteSession` on `engine` for each spec."""
    return lambda spec: ByteSession(engine, spec)


def _reply(content: str, model: str, finish: str) -> ChatCompletion:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content}}
    return ChatCompletion.model_validate(
        {"id": "scripted", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
    )
