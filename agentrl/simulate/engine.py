"""Engines in virtual time: continuous batching, prefill, publishes, interruption.

All sequences of an engine decode in step, so each needs no timer of its own: the engine counts decode steps
(`_progress`), a sequence ends when that count has grown by its length, and one timer waits for the nearest end. A
finished generation is told as runs of tokens, one a weight version, as a real engine would.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from agentrl.simulate.cost import EngineCost
from agentrl.types import Version

HORIZON = 256.0
"""Decode steps after which the pace is computed anew, since contexts grow."""

Runs = list[tuple[Version, int]]
"""Tokens by the version that made them, in order."""


@dataclass(eq=False, slots=True)
class _Sequence:
    context: int
    fresh: int
    tokens: int
    ended: asyncio.Future[float]
    start: float = -1.0
    """The engine's progress when it was admitted; negative while it waits."""
    cancelled: bool = False


@dataclass(slots=True)
class Gauge:
    """Seconds and tokens of one engine since the last reset."""

    idle: float = 0.0
    """Nothing to do."""
    paused: float = 0.0
    """Stopped by a publish."""
    prefill: float = 0.0
    busy: float = 0.0
    """Everything else: decoding."""
    tokens: float = 0.0
    waiting: float = 0.0
    """Request-seconds in the queue."""
    steps: float = 0.0
    """Decode steps."""


class VirtualEngine:
    """One engine server."""

    def __init__(self, cost: EngineCost, version: Version) -> None:
        self.cost = cost
        self.gauge = Gauge()
        self.sessions = 0
        self.flushes = 0
        """Counts publishes that emptied the cache: what a session left there before is gone."""
        self.prompts: set[int] = set()
        """Rows whose prompt is in the cache."""
        self.in_flight = 0
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._queue: deque[_Sequence] = deque()
        self._ends: list[tuple[float, int, _Sequence]] = []
        self._count = 0
        self._running = 0
        self._context = 0.0
        self._progress = 0.0
        self._pace = 0.0
        self._debt = 0.0
        """Seconds of prefill that come before the next decode step."""
        self._paused = False
        self._draining = False
        self._empty = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._marks: list[tuple[float, Version]] = [(0.0, version)]

    async def generate(self, context: int, fresh: int, tokens: int) -> Runs:
        """Sample `tokens` after a context of which `fresh` tokens are not in the cache."""
        sequence = _Sequence(context, fresh, max(1, tokens), self._loop.create_future())
        self._advance()
        self.in_flight += 1
        self._queue.append(sequence)
        self._go_on()
        try:
            return self._runs(sequence, await sequence.ended)
        finally:
            self.in_flight -= 1
            if not sequence.ended.done() or sequence.ended.cancelled():
                self._remove(sequence)

    # --- publishing

    def pause(self) -> None:
        """Stop at the next token."""
        self._advance()
        self._paused = True
        self._go_on()

    def resume(self, version: Version) -> None:
        """Go on with new weights."""
        self._advance()
        self._marks.append((self._progress, version))
        if self.cost.recompute:
            self.flushes += 1
            self.prompts.clear()
            self._debt += self.cost.prefill * self._context
        self._paused = self._draining = False
        self._go_on()

    async def drain(self) -> None:
        """Admit nothing more and wait until nothing runs."""
        self._draining = True
        self._empty.clear()
        if self._running:
            await self._empty.wait()

    def reset(self) -> None:
        """Begin to measure."""
        self._advance()
        self.gauge = Gauge()

    def measure(self) -> Gauge:
        """What was measured since the reset."""
        self._advance()
        return self.gauge

    # --- the clock

    def _advance(self) -> None:
        """Account for the time since the last event."""
        now = self._loop.time()
        passed, self._at = now - self._at, now
        self.gauge.waiting += passed * len(self._queue)
        if self._paused:
            self.gauge.paused += passed
            return
        if not self._running:
            self.gauge.idle += passed
            return
        filled = min(self._debt, passed)
        self._debt -= filled
        self.gauge.prefill += filled
        decoded = passed - filled
        if decoded > 0.0:
            steps = decoded / self._pace
            self.gauge.busy += decoded
            self.gauge.steps += steps
            self.gauge.tokens += steps * self._running
            self._progress += steps
            self._context += steps * self._running

    def _go_on(self) -> None:
        """Take in what fits and wait for the nearest end."""
        while self._queue and self._running < self.cost.slots and not self._paused and not self._draining:
            self._admit(self._queue.popleft())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._paused or not self._running:
            return
        while self._ends[0][2].cancelled:
            heapq.heappop(self._ends)
        self._pace = self.cost.decode(self._running, self._context)
        steps = min(max(self._ends[0][0] - self._progress, 0.0), HORIZON)
        self._timer = self._loop.call_later(self._debt + steps * self._pace, self._tick)

    def _admit(self, sequence: _Sequence) -> None:
        if sequence.cancelled:
            return
        sequence.start = self._progress
        self._running += 1
        self._count += 1
        self._context += sequence.context
        self._debt += self.cost.request + self.cost.prefill * sequence.fresh
        heapq.heappush(self._ends, (self._progress + sequence.tokens, self._count, sequence))

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        due = self._progress + 1e-6 * max(1.0, self._progress * 1e-3)
        while self._ends and (self._ends[0][0] <= due or self._ends[0][2].cancelled):
            end, _, sequence = heapq.heappop(self._ends)
            if not sequence.cancelled:
                self._leave(sequence)
                if not sequence.ended.done():
                    sequence.ended.set_result(end)
        self._go_on()

    def _leave(self, sequence: _Sequence) -> None:
        self._running -= 1
        self._context -= sequence.context + min(self._progress - sequence.start, sequence.tokens)
        if not self._running:
            self._context = self._debt = 0.0
            self._empty.set()

    def _remove(self, sequence: _Sequence) -> None:
        """Its request was cancelled: an abort."""
        self._advance()
        sequence.cancelled = True
        if sequence.start >= 0:
            self._leave(sequence)
        self._go_on()

    def _runs(self, sequence: _Sequence, end: float) -> Runs:
        """Which of its tokens came from which version."""
        runs: Runs = []
        upto = sequence.tokens
        for at, version in reversed(self._marks):
            begin = min(max(0, round(at - sequence.start)), upto)
            if upto > begin:
                runs.append((version, upto - begin))
            upto = begin
            if at <= sequence.start:
                break
        return runs[::-1]


class Line:
    """The conductor's event loop. All that is under way takes turns: with n pieces of work each goes n times slower."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._share = 0.0
        self._busy = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, seconds: float) -> None:
        """Be done after `seconds` of the loop's time."""
        if seconds <= 0:
            return
        self._advance()
        done: asyncio.Future[None] = self._loop.create_future()
        self._count += 1
        heapq.heappush(self._ends, (self._share + seconds, self._count, done))
        self._go_on()
        await done

    def busy(self) -> float:
        """Seconds in which something was under way, so far."""
        self._advance()
        return self._busy

    def _advance(self) -> None:
        """`_share` counts the seconds that each piece of work has had."""
        now = self._loop.time()
        if self._ends:
            self._busy += now - self._at
            self._share += (now - self._at) / len(self._ends)
        self._at = now

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._share) * len(self._ends)
            self._timer = self._loop.call_later(left, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._share + 1e-9:
            done = heapq.heappop(self._ends)[2]
            if not done.done():  # a cancelled episode's work is done all the same
                done.set_result(None)
        self._go_on()


class Fleet:
    """All engines behind one router: sessions stay, new ones go where least is in flight, weights go to all."""

    def __init__(self, engines: int, cost: EngineCost, version: Version, *, interrupt: bool) -> None:
        self.engines = [VirtualEngine(cost, version) for _ in range(engines)]
        self.version = version
        self.publish_seconds = 0.0
        """Of all publishes together, the waits of uninterrupted ones included."""
        self._interrupt = interrupt
        self._cost = cost

    def assign(self) -> VirtualEngine:
        """The engine of a new session, by the real router's rule."""
        engine = min(self.engines, key=lambda e: (e.in_flight, e.sessions))
        engine.sessions += 1
        return engine

    async def publish(self, path: Path, version: Version) -> Version:
        """New weights for all engines, in the form that the conductor's `Publisher` calls."""
        begin = asyncio.get_running_loop().time()
        if not self._interrupt:
            await asyncio.gather(*(engine.drain() for engine in self.engines))
        for engine in self.engines:
            engine.pause()
        await asyncio.sleep(self._cost.load)
        for engine in self.engines:
            engine.resume(version)
        self.version = version
        self.publish_seconds += asyncio.get_running_loop().time() - begin
        return version
