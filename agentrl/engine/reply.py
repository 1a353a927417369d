"""What an engine's reply says, checked on arrival, and what one request has gathered over any number of replies.

A reply whose ids, log-probs and version spans do not agree is an engine fault: it is refused here and never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from agentrl.engine.types import Completion, GenerateRequest, Span, Top
from agentrl.errors import EngineError, RequestRefused
from agentrl.types import Int32Array, Version

Rows = list[list[tuple[float, int]]]
"""(log-prob, id) of the likeliest tokens at each place, best first."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, control tokens included: what engines match stop strings against."""


class Part(NamedTuple):
    """One reply. `finish` is "stop", "length", "abort", or "" for a stream's event before the last. `top` has a row a
    token where likeliest tokens were asked for."""

    tokens: list[int]
    logprobs: list[float]
    spans: tuple[Span, ...]
    finish: str
    matched: int | str | None
    detail: str
    status: int | None
    top: Rows


def parse_part(reply: Mapping[str, Any], vocab_size: int | None, pinned: Version | None, top: int = 0) -> Part:
    """Read a `/generate` reply or stream event, which was asked for the `top` likeliest tokens at each place.

    `pinned` is the version that the engine held before the request was sent: where the reply has that label and no
    spans (servers before 0.5.19) it labels all tokens, because no label ever comes back. None where it is not known.
    Raises EngineError for anything inconsistent.
    """
    try:
        return _read_part(reply, vocab_size, pinned, top)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise EngineError(f"the engine's reply is in an unknown form ({error!r}): {reply!r:.300}") from error


def _read_part(reply: Mapping[str, Any], vocab_size: int | None, pinned: Version | None, top: int) -> Part:
    meta = reply.get("meta_info") or {}
    reason = meta.get("finish_reason") or {"type": ""}
    finish = str(reason.get("type", ""))
    if finish not in ("stop", "length", "abort", ""):
        raise EngineError(f"finish reason {reason!r} is unknown: expected stop, length or abort")
    tokens: list[int] = reply.get("output_ids") or []
    if not {int}.issuperset(map(type, tokens)):
        raise EngineError(f"the engine sent token ids that are no whole numbers: {tokens!r:.200}")
    matched = reason.get("matched") if finish == "stop" and type(reason.get("matched")) in (int, str) else None
    tokens, logprobs = _pair(tokens, meta.get("output_token_logprobs"), matched)
    if tokens and (min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size)):
        raise EngineError(
            f"the engine sent token ids {min(tokens)}..{max(tokens)}, outside its vocabulary {vocab_size}"
        )
    spans = _spans(meta, len(tokens), pinned, whole=bool(finish))
    status = reason.get("status_code")
    detail = str(reason.get("message") or "")
    rows = _top(meta, len(tokens), top) if top else []
    return Part(tokens, logprobs, spans, finish, matched, detail, status if type(status) is int else None, rows)


def _top(meta: Mapping[str, Any], n: int, k: int) -> Rows:
    listed = meta.get("output_top_logprobs") or []
    rows = [[(float(entry[0]), int(entry[1])) for entry in row or ()] for row in listed]
    if len(rows) != n or any(len(row) != k for row in rows):
        raise EngineError(
            f"the engine sent {n} tokens, the likeliest ones as {len(rows)} rows of {sorted({len(r) for r in rows})}; "
            f"expected {n} rows of {k}"
        )
    return rows


def _pair(tokens: list[int], entries: Any, matched: Any) -> tuple[list[int], list[float]]:
    """Equal numbers of ids and log-probs; a matched stop id that only has its log-prob is put back."""
    if not entries:
        if tokens:
            raise EngineError(
                f"missing_logprobs: {len(tokens)} tokens came without log-probs; the engine must honour return_logprob"
            )
        return [], []
    paired = type(entries[0]) is list
    try:
        logprobs: list[Any] = (
            [entry[0] for entry in entries] if paired else [None if p is None else float(p) for p in entries]
        )
        named = [entry[1] for entry in entries] if paired else [None] * len(logprobs)
    except (TypeError, ValueError, LookupError) as error:
        raise EngineError(f"the engine sent log-probs in an unknown form: {entries!r:.200}") from error
    dropped_stop = len(logprobs) == len(tokens) + 1 and isinstance(matched, int) and named[-1] in (None, matched)
    if dropped_stop:
        tokens = [*tokens, matched]
    if len(logprobs) != len(tokens):
        raise EngineError(f"the engine sent {len(tokens)} tokens but {len(logprobs)} log-probs: the reply is refused")
    if named != tokens:
        for at, (token, name) in enumerate(zip(tokens, named, strict=True)):
            if name is not None and name != token:
                raise EngineError(f"token {at} is {token} but its log-prob is of {name}: the reply is refused")
    if not _finite(logprobs):
        at = next(i for i, logprob in enumerate(logprobs) if not _finite([logprob]))
        raise EngineError(f"missing_logprobs: token {at} has log-prob {logprobs[at]!r}: the reply is refused")
    return tokens, logprobs


def _finite(logprobs: list[Any]) -> bool:
    return None not in logprobs and all(map(math.isfinite, logprobs))


def _spans(meta: Mapping[str, Any], n: int, pinned: Version | None, *, whole: bool) -> tuple[Span, ...]:
    listed = meta.get("weight_versions")
    if n == 0:
        return ()
    if listed:
        spans = tuple(
            Span(_version(s["version"]), int(s["start"]), int(s["end"])) for s in listed if s["end"] > s["start"]
        )
    elif pinned is not None and str(meta.get("weight_version", pinned)) == str(pinned):
        spans = (Span(pinned, 0, n),)
    elif whole:
        raise EngineError(
            f"{n} tokens came without version spans while the weights changed (label {meta.get('weight_version')!r}, "
            f"{pinned} before): this server cannot say which weights made them; pause it with mode 'abort'"
        )
    else:
        return ()
    at = 0
    for span in spans:
        if span.start != at:
            raise EngineError(f"version spans {listed} do not tile {n} tokens")
        at = span.end
    if at != n:
        raise EngineError(f"version spans {listed} cover {at} of {n} tokens")
    return spans


def _version(label: Any) -> Version:
    try:
        return Version.parse(str(label))
    except ValueError as error:
        raise EngineError(f"the engine labels its weights wrongly: {error}") from error


@dataclass
class Progress:
    """One request's tokens so far, over interruptions, lost connections and several engines."""

    request: GenerateRequest
    limit: int
    """The budget: `max_tokens`, or what the context leaves of it."""
    decode: Decode | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    top: Rows = field(default_factory=list)
    attempts: int = 0
    losses: int = 0
    waiting_for: str = "a free engine"

    @property
    def left(self) -> int:
        """How many tokens of the budget are left."""
        return self.limit - len(self.tokens)

    @property
    def prompt(self) -> Int32Array:
        """What to send next: the prompt and everything sampled so far."""
        if not self.tokens:
            return self.request.tokens
        return np.concatenate([self.request.tokens, np.array(self.tokens, np.int32)])

    @property
    def continues(self) -> bool:
        """Whether a continuation from the tokens so far behaves as if never interrupted.

        Penalties and grammars count the sampled tokens, and stop strings may straddle the seam, which only a decoder
        can see. Where this is False an interrupted request starts again from its prompt.
        """
        sampling = self.request.sampling
        counts = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0
        return not (counts or sampling.grammar or (sampling.stop and self.decode is None))

    def next_id(self) -> str:
        """A request id that no earlier attempt had. None begins another: SGLang aborts every id that begins with what
        it is given, so an abort of choice 1 would hit choice 10."""
        self.attempts += 1
        return f"{self.request.id}." if self.attempts == 1 else f"{self.request.id}~{self.attempts - 1}."

    def add(self, part: Part) -> str | None:
        """Take a reply's tokens; returns the stop string if one was completed across the seam."""
        seam = len(self.tokens)
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.top += part.top
        for span in part.spans:
            self._add_span(span.version, span.end - span.start)
        return self._straddling_stop(seam) if seam and self.request.sampling.stop else None

    def keep(self, part: Part | None) -> None:
        """After an interruption: keep what the broken reply had brought, or start again where that is not exact."""
        if not self.continues:
            self.tokens, self.logprobs, self.spans, self.top = [], [], [], []
        elif part is not None and part.spans:
            self.add(part)

    def ended(self) -> Completion | None:
        """The completion, where the tokens so far use up the budget or meet a stop condition. An interruption in the
        step of the last token hides that: the reply says "abort", or never comes."""
        matched = self._stop_met() if self.tokens else None
        if matched is not None:
            return self.completion("stop", matched)
        return self.completion("length") if self.tokens and self.left <= 0 else None

    def completion(self, finish: str, matched: int | str | None = None, more: Part | None = None) -> Completion:
        """Everything so far, with the tokens of `more` behind it."""
        spans, n = list(self.spans), len(self.tokens)
        if more is not None:
            spans += [Span(s.version, n + s.start, n + s.end) for s in more.spans]
        tokens = self.tokens if more is None else self.tokens + more.tokens
        logprobs = self.logprobs if more is None else self.logprobs + more.logprobs
        top = self._top(more) if self.request.sampling.top_logprobs else None
        return Completion(
            np.array(tokens, np.int32), np.array(logprobs, np.float32), merged_spans(spans), finish, matched, top
        )

    def _top(self, more: Part | None) -> Top:
        rows = self.top if more is None else self.top + more.top
        table = np.array(rows, np.float64).reshape(len(rows), self.request.sampling.top_logprobs, 2)
        return Top(table[:, :, 1].astype(np.int32), table[:, :, 0].astype(np.float32))

    def _add_span(self, version: Version, n: int) -> None:
        start = self.spans[-1].end if self.spans else 0
        self.spans = list(merged_spans([*self.spans, Span(version, start, start + n)]))

    def _straddling_stop(self, seam: int) -> str | None:
        stops = self.request.sampling.stop
        assert self.decode is not None, "`continues` lets no seam into a request with stop strings and no decoder"
        longest = _longest(stops)
        for end in range(seam + 1, min(len(self.tokens), seam + longest) + 1):
            text = self.decode(self.tokens[max(0, end - longest - 1) : end])
            found = next((stop for stop in stops if stop in text), None)
            if found is not None:
                self._cut(end)
                return found
        return None

    def _stop_met(self) -> int | str | None:
        sampling = self.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids:
            return self.tokens[-1]
        if not sampling.stop or self.decode is None:
            return None
        text = self.decode(self.tokens[-_longest(sampling.stop) - 1 :])
        return next((stop for stop in sampling.stop if stop in text), None)

    def _cut(self, end: int) -> None:
        del self.tokens[end:], self.logprobs[end:], self.top[end:]
        self.spans = [Span(s.version, s.start, min(s.end, end)) for s in self.spans if s.start < end]


def _longest(stops: Sequence[str]) -> int:
    """The most tokens that a stop string may have: its bytes, as rare characters have several tokens."""
    return max(len(stop.encode()) for stop in stops)


def merged_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbours of one version joined."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = Span(span.version, merged[-1].start, span.end)
        else:
            merged.append(span)
    return tuple(merged)


def start(
    request: GenerateRequest, vocab_size: int | None, context_length: int | None, decode: Decode | None
) -> Progress:
    """Check a request before it is sent (a bad id kills a real server) and cut its budget to the context."""
    ids, budget = request.tokens, request.sampling.max_tokens
    if ids.size == 0:
        raise RequestRefused(f"request {request.id}: the prompt is empty; send at least one token")
    if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
        raise RequestRefused(
            f"request {request.id}: token ids {int(ids.min())}..{int(ids.max())} are not all in the vocabulary "
            f"0..{(vocab_size or 0) - 1}: the prompt was made with another model's tokenizer"
        )
    if budget < 1:
        raise RequestRefused(f"request {request.id}: max_tokens is {budget}, expected at least 1")
    if context_length is not None:
        if ids.size >= context_length:
            raise RequestRefused(
                f"request {request.id}: the prompt has {ids.size} tokens and the context holds {context_length}: "
                "shorten the history, or raise engine.context_length"
            )
        budget = min(budget, context_length - int(ids.size))
    return Progress(request, budget, decode)
