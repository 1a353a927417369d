"""The generating thread: continuous batching, stops, pauses and weight swaps.

Between any two steps it looks at its inbox, so a pause or a swap takes effect at the next token. After a swap the
running sequences wait to be prefilled with the new weights, in small packs with decode steps in between: the first ones
go on while the others wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agentrl.engine.embedded.model import Chunk, KVCache, Model
from agentrl.engine.embedded.parameters import Weights
from agentrl.engine.embedded.sampler import likeliest, sample, uniforms
from agentrl.engine.embedded.sequence import Decode, Live
from agentrl.engine.embedded.slots import Slots
from agentrl.types import Int32Array

_PREFILL_SECONDS = 0.025
"""How long prefilling may hold up the running sequences, but for a single long prompt."""
_FREE = 32
"""So many tokens are packed in any case: a pass reads all weights, however few they are, and measured by passes of a
few tokens a large model would seem too slow for more."""
_SHARED = 16
"""A waiting prompt that shares at least so many more tokens with one about to be prefilled waits for it."""
_LOOK_AHEAD = 64


@dataclass
class Counters:
    """What `/server_info` reports."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    decode_steps: int = 0
    publishes: int = 0
    longest_gap_ms: float = 0.0
    """The longest time without a token while there was work, since the last swap (its own gap included)."""


class Scheduler:
    """Runs in one thread (`run`); everything else reaches it through `do`."""

    def __init__(
        self,
        model: Model,
        weights: Weights,
        version: str,
        cache: KVCache,
        *,
        max_running: int,
        decode: Decode | None,
    ) -> None:
        self.weights = weights
        self.version = version
        self.paused = False
        self.counters = Counters()
        self._model = model
        self._decode_text = decode
        self._slots = Slots(cache, 2 * max_running, max_running, model.shape.context)
        self._waiting: deque[Live] = deque()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._tokens_per_second = 0.0
        self._last_token: float | None = None

    # -- from other threads ----------------------------------------------------------------------------------------

    def do(self, action: Callable[[], None]) -> None:
        """Run `action` in the generating thread, between two steps."""
        self._inbox.append(action)
        self._wake.set()

    def stop(self) -> None:
        """End `run`."""
        self._stopping = True
        self._wake.set()

    @property
    def running(self) -> int:
        """Sequences in a row."""
        return self._slots.count

    @property
    def waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting)

    # -- actions, in the generating thread ---------------------------------------------------------------------------

    def add(self, live: Live) -> None:
        """Queue a request."""
        self._waiting.append(live)

    def abort(self, match: Callable[[Live], bool]) -> None:
        """End the matching requests with what they have."""
        for live in [x for x in (*self._waiting, *self._slots.active) if match(x)]:
            self._finish(live, {"type": "abort", "message": "Aborted"})

    def swap(self, weights: Weights, version: str, keep_kv: bool) -> None:
        """Take new weights. Running sequences are recomputed with them, unless `keep_kv`."""
        self.relabel(version)
        self.weights = weights
        self.counters.publishes += 1
        self.counters.longest_gap_ms = 0.0
        if keep_kv:
            self._slots.drop_kept()
        else:
            self._waiting.extendleft(reversed(self._slots.retract()))

    def relabel(self, version: str) -> None:
        """Change the label; tokens so far keep the old one."""
        if version != self.version:
            for live in (*self._waiting, *self._slots.active):
                live.relabelled(self.version)
        self.version = version

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Generate until `stop`."""
        with torch.inference_mode():
            while not self._stopping:
                self._read_inbox()
                if self.paused or not (self._waiting or self._slots.count):
                    if not (self._waiting or self._slots.count):
                        self._last_token = None
                    self._wake.wait()
                    continue
                self._prefill()
                if self._slots.count and not self._inbox:
                    self._step()

    def _read_inbox(self) -> None:
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()()

    def _prefill(self) -> None:
        started = time.monotonic()
        while self._waiting and not self._slots.full and not self._inbox:
            begun = time.monotonic()
            pack = self._pack()
            chunks, tokens = [], []
            for live in pack:
                row, shared = self._slots.admit(live)
                ids = live.ids[shared:]
                chunks.append(Chunk(row, shared, ids.size))
                tokens.append(ids)
                self.counters.cached_tokens += shared
            flat = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
            logits = self._model.prefill(self.weights, flat, chunks)
            self._measure(flat.numel(), time.monotonic() - begun)
            self._take(logits, np.array([c.row for c in chunks]))
            if time.monotonic() - started > _PREFILL_SECONDS:
                return

    def _measure(self, tokens: int, seconds: float) -> None:
        """Packing included: with many short contexts it takes as long as the pass itself."""
        rate = tokens / max(seconds, 1e-6)
        self._tokens_per_second = 0.5 * (self._tokens_per_second + rate) if self._tokens_per_second else rate
        self.counters.prefilled_tokens += tokens

    def _pack(self) -> list[Live]:
        """The next requests to prefill in one pass: as many tokens as fit the time, at least one request."""
        limit = max(_FREE, self._tokens_per_second * _PREFILL_SECONDS)
        pack: list[Live] = []
        packed: set[int] = set()
        """Marks of the packed ones."""
        later: list[Live] = []
        total = 0
        while self._waiting and self._slots.count + len(pack) < self._slots.running and len(later) < _LOOK_AHEAD:
            live = self._waiting.popleft()
            ids = live.ids
            shared = self._slots.match(ids)[1]
            marks, at = _marks(ids), -(-shared // _SHARED)
            if at < len(marks) and marks[at] in packed:
                later.append(live)
                continue
            if pack and total + ids.size - shared > limit:
                later.append(live)
                break
            pack.append(live)
            packed.update(marks)
            total += ids.size - shared
        self._waiting.extendleft(reversed(later))
        return pack

    def _step(self) -> None:
        rows, n = self._slots.step(), self._slots.span
        tokens, before = (torch.from_numpy(x) for x in (self._slots.last[:n], self._slots.lengths[:n] - 1))
        logits = self._model.decode(self.weights, tokens, before, torch.from_numpy(rows))
        self.counters.decode_steps += 1
        self._take(logits, rows)

    def _take(self, logits: torch.Tensor, rows: np.ndarray[Any, Any]) -> None:
        """Sample one token for each of `rows` and see who ends."""
        slots = self._slots
        lives = [slots.live(row) for row in rows]
        broken = ~torch.isfinite(logits).all(-1)
        if bool(broken.any()):
            logits[broken] = 0.0
        special = {
            i: (live.rule, live.ids, int(live.prompt.size))
            for i, live in enumerate(lives)
            if live.rule.cut or live.rule.penalised
        }
        uniform = uniforms(slots.seeds[rows], slots.lengths[rows])
        sampled = sample(logits, torch.from_numpy(slots.temperatures[rows]), uniform, special)
        slots.last[rows] = sampled.tokens
        ended: list[tuple[Live, dict[str, Any]]] = []
        for i, (live, token, logprob) in enumerate(zip(lives, sampled.tokens, sampled.logprobs, strict=True)):
            live.tokens.append(token)
            live.logprobs.append(logprob)
            if live.rule.top:
                live.top.append(likeliest(sampled.table[i], live.rule.top))
            finish = live.ended(self._decode_text)
            if finish is not None:
                ended.append((live, finish))
            elif live.interval and (len(live.tokens) - 1) % live.interval == 0:
                live.send(live.reply(self.version, None), False)
        slots.held[rows] = slots.lengths[rows]
        slots.ids[rows, slots.lengths[rows]] = slots.last[rows]
        slots.lengths[rows] += 1
        self._count(len(lives))
        for i in broken.nonzero()[:, 0].tolist():
            self._break(lives[i], ended)
        for live, finish in ended:
            self._finish(live, finish)

    def _break(self, live: Live, ended: list[tuple[Live, dict[str, Any]]]) -> None:
        del live.tokens[-1], live.logprobs[-1], live.top[-1:]
        self._slots.forget(live)
        ended[:] = [e for e in ended if e[0] is not live]
        message = "the weights gave logits that are not finite"
        ended.append((live, {"type": "abort", "message": message, "status_code": 500}))

    def _count(self, tokens: int) -> None:
        now = time.monotonic()
        if self._last_token is not None:
            self.counters.longest_gap_ms = max(self.counters.longest_gap_ms, 1e3 * (now - self._last_token))
        self._last_token = now
        self.counters.generated_tokens += tokens

    def _finish(self, live: Live, finish: dict[str, Any]) -> None:
        if live.waiting:
            self._waiting.remove(live)
        else:
            self._slots.release(live)
        live.send(live.reply(self.version, finish), True)


def _marks(ids: Int32Array) -> list[int]:
    """A hash of what `ids` begins with, for the first `_SHARED` tokens, for twice as many, and so on."""
    raw, marks, mark = ids.tobytes(), [], 0
    for at in range(4 * _SHARED, len(raw) + 1, 4 * _SHARED):
        mark = hash((mark, raw[at - 4 * _SHARED : at]))
        marks.append(mark)
    return marks
