"""One `/generate` exchange: the body that is sent and the reading of what comes back, whole or streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np

from agentrl.engine.http import error_text, json_object, sse_events
from agentrl.engine.reply import Part, Progress, parse_part
from agentrl.engine.types import GrammarRefused, OnTokens, Sampling
from agentrl.engine.weights import Limits
from agentrl.errors import EngineError, RequestRefused
from agentrl.types import Version

RETRIED = frozenset({429, 502, 503, 504})
"""Answers that ask to come again."""


def not_served(progress: Progress, url: str, status: int, body: bytes) -> None:
    """Return where the server asks to come again; raise RequestRefused or EngineError otherwise."""
    text = error_text(body)
    if status in RETRIED:
        progress.waiting_for = f"a server that answers {status} ({text})"
        return
    kind = refusal(progress, text) if 400 <= status < 500 else EngineError
    raise kind(f"request {progress.request.id}: {url} answered {status}: {text}")


def refusal(progress: Progress, text: str) -> type[RequestRefused]:
    """What a refusal with this text is called."""
    about_grammar = progress.request.sampling.grammar is not None and "grammar" in text.lower()
    return GrammarRefused if about_grammar else RequestRefused


class Reading:
    """Reads one reply. `safe` is what a broken stream had brought whose version is certain."""

    def __init__(
        self,
        progress: Progress,
        url: str,
        limits: Limits | None,
        pinned: Version | None,
        current: Callable[[], Version | None],
        on_tokens: OnTokens | None,
    ) -> None:
        self._progress = progress
        self._url = url
        self._vocab_size = None if limits is None else limits.vocab_size
        self._pinned = pinned
        self._current = current
        self._on_tokens = on_tokens
        self.safe: Part | None = None

    def whole(self, body: bytes) -> Part:
        """A reply that came in one piece."""
        return self._parse(json_object(body))

    async def stream(self, response: aiohttp.ClientResponse) -> Part | None:
        """Read the events to the last; None for an error event that asks to come again."""
        seen: list[int] = []
        async for data in sse_events(response):
            event = json_object(data)
            if "error" in event:
                error = event["error"]
                status = int(error.get("code") or 400) if isinstance(error, dict) else 400
                not_served(self._progress, self._url, status, data)
                return None
            part = self._parse(event)
            if part.finish != "abort" and part.tokens[: len(seen)] != seen:
                raise EngineError(
                    f"request {self._progress.request.id}: {self._url} streams what is new and not what there is: "
                    "start it without --incremental-streaming-output"
                )
            seen = part.tokens
            if part.finish:
                if self._on_tokens is not None and part.finish != "abort" and part.tokens:
                    self._on_tokens(self._progress.completion("length", None, part))
                return part
            if part.spans:
                self.safe = part
                if self._on_tokens is not None:
                    self._on_tokens(self._progress.completion("length", None, part))
        raise aiohttp.ClientPayloadError("the stream ended without a finish reason")

    def _parse(self, reply: dict[str, Any]) -> Part:
        # A reply without any label says nothing of a change under way: only our own knowledge counts then.
        labelled = "weight_version" in (reply.get("meta_info") or {})
        pinned = self._pinned if labelled or self._pinned == self._current() else None
        return parse_part(reply, self._vocab_size, pinned, self._progress.request.sampling.top_logprobs)


def generate_body(progress: Progress, rid: str, asked: int, stream_interval: int | None) -> dict[str, Any]:
    """The request that goes on from `progress`; a stream where `stream_interval` is given. `input_ids` is an array."""
    body: dict[str, Any] = {
        "input_ids": np.ascontiguousarray(progress.prompt),
        "sampling_params": sampling_params(progress.request.sampling, asked),
        "return_logprob": True,
        "rid": rid,
    }
    if progress.request.sampling.top_logprobs:
        body["top_logprobs_num"] = progress.request.sampling.top_logprobs
    if stream_interval is not None:
        body["stream"] = True
        body["sampling_params"]["stream_interval"] = stream_interval
    return body


def sampling_params(sampling: Sampling, max_new_tokens: int) -> dict[str, Any]:
    """SGLang's form; what has the default is left out, so that older servers see nothing they do not know."""
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "skip_special_tokens": False,
    }
    optional: dict[str, tuple[Any, Any]] = {
        "stop": (list(sampling.stop), []),
        "stop_token_ids": (list(sampling.stop_token_ids), []),
        "sampling_seed": (None if sampling.seed is None else sampling.seed % 2**63, None),
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1),
        "min_p": (sampling.min_p, 0.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 1.0),
    }
    if sampling.grammar is not None:
        params[sampling.grammar.kind] = sampling.grammar.text
    return params | {name: value for name, (value, default) in optional.items() if value != default}
