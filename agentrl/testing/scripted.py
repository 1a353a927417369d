"""An honest engine that plays a script instead of a model: for tests of whatever stands above the engine.

It keeps the engine's contract in full: budget and stop ids are obeyed, the deadline is kept, versions are those that
were current when each token was made, a cancelled request is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from agentrl.engine.types import Completion, GenerateRequest, GrammarRefused, OnTokens, Sampling, Span, Top
from agentrl.errors import DeadlineExceeded, RequestRefused
from agentrl.types import Int32Array, Version


class ScriptedEngine:
    """Answers every prompt with `reply(prompt tokens)`, cut by the budget and by stop ids.

    ```python
    engine = ScriptedEngine(lambda prompt: [5, 6, 7])
    completion = await engine.generate(request)   # tokens 5 6 7, log-probs -0.5, one span of version 1.0
    engine.version = Version(1, 1)                # as a publish would; running requests get a second span
    ```

    `delay` seconds pass before the first token and `token_delay` before each later one; at `holds_at` tokens every
    request stands still until that is None again, so that a test can act in the middle of it. `decode` is needed only
    where requests have stop strings. Without `grammars` it refuses them; with them the script must obey. Where
    likeliest tokens are asked for, the script's own is first and the others are the lowest ids, each 0.1 less likely.
    `requests` lists everything that was asked.
    """

    def __init__(
        self,
        reply: Callable[[Int32Array], Sequence[int]],
        *,
        version: Version = Version(1, 0),
        delay: float = 0.0,
        token_delay: float = 0.0,
        logprob: float = -0.5,
        context_length: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        grammars: bool = False,
    ) -> None:
        self.reply = reply
        self.version = version
        self.delay = delay
        self.token_delay = token_delay
        self.logprob = logprob
        self.context_length = context_length
        self.decode = decode
        self.grammars = grammars
        self.holds_at: int | None = None
        self.requests: list[GenerateRequest] = []
        self.running = 0

    def set_version(self, version: Version) -> None:
        """What a publish does: tokens made from now on carry `version`."""
        self.version = version

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Play the script for one request."""
        self.requests.append(request)
        if self.context_length is not None and request.tokens.size >= self.context_length:
            raise RequestRefused(
                f"the prompt has {request.tokens.size} tokens, the context {self.context_length}: shorten the history"
            )
        if request.sampling.stop and self.decode is None:
            raise RequestRefused(f"stop strings {request.sampling.stop} need ScriptedEngine(decode=…)")
        if request.sampling.grammar is not None and not self.grammars:
            raise GrammarRefused(f"{request.sampling.grammar.kind}: the scripted engine has no grammars")
        self.running += 1
        try:
            async with asyncio.timeout_at(request.deadline):
                return await self._play(request, on_tokens)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request.id}: the scripted engine was too slow for the deadline"
            ) from error
        finally:
            self.running -= 1

    async def _play(self, request: GenerateRequest, on_tokens: OnTokens | None) -> Completion:
        await asyncio.sleep(self.delay)
        tokens: list[int] = []
        versions: list[Version] = []
        matched: int | str | None = None
        finish = "stop"
        for token in self.reply(request.tokens):
            if len(tokens) >= request.sampling.max_tokens:
                finish = "length"
                break
            if tokens and self.token_delay:
                await asyncio.sleep(self.token_delay)
            while self.holds_at is not None and len(tokens) >= self.holds_at:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            tokens.append(int(token))
            versions.append(self.version)
            if on_tokens is not None:
                on_tokens(self._completion(request, tokens, versions, "length", None))
            matched = self._matched(tokens, request.sampling)
            if matched is not None:
                break
        return self._completion(request, tokens, versions, finish, matched)

    def _matched(self, tokens: list[int], sampling: Sampling) -> int | str | None:
        if tokens[-1] in sampling.stop_token_ids:
            return tokens[-1]
        if sampling.stop and self.decode is not None:
            text = self.decode(tokens)
            return next((stop for stop in sampling.stop if stop in text), None)
        return None

    def _completion(
        self,
        request: GenerateRequest,
        tokens: list[int],
        versions: list[Version],
        finish: str,
        matched: int | str | None,
    ) -> Completion:
        return Completion(
            np.array(tokens, np.int32),
            np.full(len(tokens), self.logprob, np.float32),
            spans_of(versions),
            finish,
            matched,
            self._top(tokens, request.sampling.top_logprobs) if request.sampling.top_logprobs else None,
        )

    def _top(self, tokens: list[int], k: int) -> Top:
        rows = [[token, *[other for other in range(k) if other != token]][:k] for token in tokens]
        logprobs = np.tile(self.logprob - 0.1 * np.arange(k, dtype=np.float32), (len(tokens), 1))
        return Top(np.array(rows, np.int32).reshape(len(tokens), k), logprobs.astype(np.float32))


def spans_of(versions: Sequence[Version]) -> tuple[Span, ...]:
    """Runs of equal versions as spans that tile the sequence."""
    spans: list[Span] = []
    for at, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].start, at + 1)
        else:
            spans.append(Span(version, at, at + 1))
    return tuple(spans)
