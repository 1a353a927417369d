"""The engine contract: token ids in, token ids with log-probs and the versions that produced them out.

An engine's `generate` hides interruption: weights may change any number of times while it runs, and the completion
says which tokens came from which version. Cancelling the task aborts the generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from agentrl.errors import EngineError
from agentrl.types import Float32Array, Int32Array, Version


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. The defaults leave the distribution as the model's own."""

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
    json_schema: str | None = None

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
            and self.json_schema is None
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


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled. `spans` tile `[0, n)`; `finish` is "stop" or "length", never an abort."""

    tokens: Int32Array  # [n]
    logprobs: Float32Array  # [n]
    spans: tuple[Span, ...]
    finish: str
    matched: int | str | None = None

    def __post_init__(self) -> None:
        n = int(np.asarray(self.tokens).size)
        if int(np.asarray(self.logprobs).size) != n:
            raise EngineError(f"the engine sent {n} tokens but {np.asarray(self.logprobs).size} log-probs")
        at = 0
        for span in self.spans:
            if span.start != at or span.end <= span.start:
                raise EngineError(f"version spans {self.spans} do not tile {n} tokens")
            at = span.end
        if at != n:
            raise EngineError(f"version spans {self.spans} cover {at} of {n} tokens")
        if self.finish not in ("stop", "length"):
            raise EngineError(f"finish reason {self.finish!r} is not a finished generation")


OnTokens = Callable[[Completion], None]
"""Called as tokens arrive, with everything sampled so far; its `finish` is "length" until the end."""


class Engine(Protocol):
    """What the endpoint needs of an engine, a router over several, or a scripted one."""

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Sample until a stop or the budget. Raises RequestRefused, EngineError or DeadlineExceeded."""
        ...
