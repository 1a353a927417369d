"""The engine contract: token ids in, token ids with log-probs and the versions that produced them out.

An engine's `generate` hides interruption: weights may change any number of times while it runs, and the completion
says which tokens came from which version. Cancelling the task aborts the generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from agentrl.errors import EngineError, RequestRefused
from agentrl.types import Float32Array, Int32Array, Version


class Grammar(NamedTuple):
    """What the sampled text must be: `text` is a JSON schema, a regular expression, or a grammar in EBNF."""

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. The defaults leave the distribution as the model's own.

    `top_logprobs` is how many of the likeliest tokens are reported beside each sampled one.
    """

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: Grammar | None = None
    top_logprobs: int = 0

    @property
    def keeps_distribution(self) -> bool:
        """Whether the reported log-probs are those of the distribution that is sampled from."""
        return (
            self.top_p == 1.0
            and self.top_k == -1
            and self.min_p == 0.0
            and self.frequency_penalty == 0.0
            and self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0
            and self.grammar is None
        )


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. `id` is unique among live requests; `deadline` is absolute, in `loop.time()` seconds."""

    id: str
    session: str
    tokens: Int32Array  # [n]
    sampling: Sampling
    deadline: float


class Span(NamedTuple):
    """Tokens `start` to `end` of a completion came from `version`."""

    version: Version
    start: int
    end: int


class Top(NamedTuple):
    """The likeliest tokens at each place, best first."""

    tokens: Int32Array  # [n, k]
    logprobs: Float32Array  # [n, k]


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled. `spans` tile `[0, n)`; `finish` is "stop" or "length", never an abort. `top` is there where
    `Sampling.top_logprobs` asked for it."""

    tokens: Int32Array  # [n]
    logprobs: Float32Array  # [n]
    spans: tuple[Span, ...]
    finish: str
    matched: int | str | None = None
    top: Top | None = None

    def __post_init__(self) -> None:
        n = int(np.asarray(self.tokens).size)
        if int(np.asarray(self.logprobs).size) != n:
            raise EngineError(f"the engine sent {n} tokens but {np.asarray(self.logprobs).size} log-probs")
        if self.top is not None and not (
            self.top.tokens.shape == self.top.logprobs.shape and len(self.top.tokens) == n
        ):
            raise EngineError(f"the engine sent {n} tokens but the likeliest ones of {len(self.top.tokens)} places")
        at = 0
        for span in self.spans:
            if span.start != at or span.end <= span.start:
                raise EngineError(f"version spans {self.spans} do not tile {n} tokens")
            at = span.end
        if at != n:
            raise EngineError(f"version spans {self.spans} cover {at} of {n} tokens")
        if self.finish not in ("stop", "length"):
            raise EngineError(f"finish reason {self.finish!r} is not a finished generation")


class GrammarRefused(RequestRefused):
    """The engine has no grammars, or cannot compile this one."""


OnTokens = Callable[[Completion], None]
"""Called as tokens arrive, with everything sampled so far; its `finish` is "length" until the end."""


class Engine(Protocol):
    """What the endpoint needs of an engine, a router over several, or a scripted one."""

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Sample until a stop or the budget. Raises RequestRefused, EngineError or DeadlineExceeded."""
        ...
