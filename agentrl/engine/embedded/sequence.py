"""One request inside the embedded engine: its tokens, how it ends, and the reply it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.engine.embedded.sampler import Rule
from agentrl.types import Int32Array

Decode = Callable[[Sequence[int]], str]
Send = Callable[[dict[str, Any], bool], None]
"""Takes a reply and whether it is the last; called in the generating thread."""


@dataclass(eq=False)
class Live:
    """A request that waits or runs. `send` gets the last reply, and one each `interval` tokens where that is not 0."""

    rid: str
    prompt: Int32Array
    budget: int
    rule: Rule
    stop_ids: frozenset[int]
    stop: tuple[str, ...]
    send: Send
    interval: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    """(log-prob, id) of the likeliest tokens at each place, where the rule asks for them."""
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(version, number of tokens up to which it was the version), for all but the current one."""
    cached: int = 0
    retractions: int = 0
    waiting: bool = True

    @property
    def ids(self) -> Int32Array:
        """Prompt and tokens so far."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    def ended(self, decode: Decode | None) -> dict[str, Any] | None:
        """The finish reason that the newest token brought, None while there is more to come."""
        token = self.tokens[-1]
        if token in self.stop_ids:
            return {"type": "stop", "matched": token}
        if self.stop and decode is not None:
            longest = max(len(stop) for stop in self.stop)
            tail = decode(self.tokens[-longest - 1 :])
            for stop in self.stop:
                if stop in tail:
                    return {"type": "stop", "matched": stop}
        if len(self.tokens) >= self.budget:
            return {"type": "length", "length": len(self.tokens)}
        return None

    def relabelled(self, old: str) -> None:
        """The weights change: what was sampled so far came from `old`."""
        if self.tokens:
            self.changes.append((old, len(self.tokens)))

    def reply(self, version: str, finish: dict[str, Any] | None) -> dict[str, Any]:
        """SGLang's form; `version` is the current label."""
        spans: list[dict[str, Any]] = []
        n, start = len(self.tokens), 0
        for label, end in [*self.changes, (version, n)]:
            if end > start and spans and spans[-1]["version"] == label:
                spans[-1]["end"] = start = end
            elif end > start or not spans:
                spans.append({"version": label, "start": start, "end": end})
                start = end
        meta = {
            "id": self.rid,
            "finish_reason": finish,
            "prompt_tokens": int(self.prompt.size),
            "completion_tokens": n,
            "cached_tokens": self.cached,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "num_retractions": self.retractions,
            "output_token_logprobs": [[p, t, None] for p, t in zip(self.logprobs, self.tokens, strict=True)],
            "output_token_logprobs_length": n,
        }
        if self.rule.top:
            meta["output_top_logprobs"] = [[[p, t, None] for p, t in row] for row in self.top]
        return {"output_ids": list(self.tokens), "meta_info": meta}
