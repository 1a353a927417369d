"""How many episodes one conductor process carries: endpoint, runner and pool in full, a scripted engine below them.

    python examples/benchmarks/concurrency.py --episodes 4096

Every episode has 8 turns of about 1,024 tokens, half shown and half sampled; the engine takes `--seconds` a turn, give
or take a half. Two waves run one after the other, each with all episodes at once. The last line is JSON:
`rss_mib_per_1k_episodes` is the growth of resident memory while a wave runs, `rss_second_wave_mib` what the second one
adds to the first, and `p99_wait_ms` how long an episode whose turn was sampled waits until its next one is asked for:
parsing, the agent, the environment, rendering, and whatever the event loop did in between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.agent import Agent
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.types import Completion, GenerateRequest, OnTokens, Span
from agentrl.env import Env
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.pool import Pool
from agentrl.rollout.runner import Runner
from agentrl.rollout.session import Session, SessionSpec
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Info, Message, Row, Step, Version

TURNS = 8
HALF = 512
SAMPLES = 8
STEADY = 2
"""Waits are counted from this turn on: the start of all episodes at once is one long queue by its nature."""


class Long(Env):
    """Says the same long text again and again."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.left = TURNS

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The first of the texts."""
        return [{"role": "user", "content": "x" * (HALF - 8)}], {}

    async def step(self, action: Message) -> Step:
        """The next."""
        self.left -= 1
        return Step([{"role": "user", "content": "y" * (HALF - 8)}], float(self.left % 2), self.left == 0, False, {})


class Paced:
    """A scripted engine that takes its time, costs next to nothing, and measures how long sessions take between turns.

    (`agentrl.testing.scripted` makes its tokens one by one, which would be half of all that is measured here.)
    """

    def __init__(self, reply: list[int], seconds: float) -> None:
        self.version = Version(1, 0)
        self._reply = np.array(reply, np.int32)
        self._logprobs = np.full(len(reply), -0.5, np.float32)
        self._seconds = seconds
        self._dice = random.Random(0)
        self._answered: dict[str, tuple[int, float]] = {}
        self.waits: list[float] = []
        self.tokens = 0

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """One turn."""
        turn, since = self._answered.pop(request.session, (0, 0.0))
        if turn >= STEADY:
            self.waits.append(time.perf_counter() - since)
        await asyncio.sleep(self._seconds * self._dice.uniform(0.5, 1.5))
        n = min(self._reply.size, request.sampling.max_tokens)
        self.tokens += n
        if turn + 1 < TURNS:
            self._answered[request.session] = (turn + 1, time.perf_counter())
        spans = (Span(self.version, 0, n),)
        return Completion(self._reply[:n].copy(), self._logprobs[:n].copy(), spans, "stop", None)


def rss_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def measure(folder: Path, episodes: int, seconds: float) -> dict[str, float]:
    """Two waves."""
    template = ChatTemplate.load(make_tiny_model(folder / "model", max_length=1 << 16))
    reply = [*template.encode([{"role": "user", "content": "z" * (HALF + 64)}], generation=False)][32 : 32 + HALF - 1]
    engine = Paced([int(token) for token in reply], seconds)
    endpoint = Endpoint(engine, template, EndpointOptions())
    groups = episodes // SAMPLES

    def open_session(spec: SessionSpec) -> Session:
        return endpoint.open(
            spec.id,
            seed=spec.seed,
            training=spec.training,
            temperature=spec.temperature,
            max_tokens=spec.max_tokens,
            deadline=spec.deadline,
        )

    options = RolloutOptions(
        groups_per_step=groups,
        samples=SAMPLES,
        staleness=0,
        max_turns=TURNS,
        max_tokens=TURNS * HALF,
        filter_equal=False,
        time_limit=3600.0,
    )
    pool = await Pool.open(folder / "pool.sqlite")
    runner = Runner(
        options,
        pool=pool,
        rows=[{"n": n} for n in range(groups)],
        seed=0,
        env="long",
        make_env=Long,
        make_agent=Agent,
        open_session=open_session,
    )
    await runner.start(Version(1, 0))
    before, began = rss_mib(), time.perf_counter()
    streaming = asyncio.create_task(runner.run())
    peaks = []
    for wave in range(2):
        peak = asyncio.create_task(_peak())
        take = await runner.take(wave, Version(1, wave), 3600.0)
        peak.cancel()
        assert take is not None, "a wave took more than an hour"
        peaks.append(await peak)
        del take
        engine.version = Version(1, wave + 1)
        if wave == 0:
            await runner.published(Version(1, 1))
    took = time.perf_counter() - began
    streaming.cancel()
    await asyncio.wait([streaming])
    await pool.close()
    done = groups * SAMPLES
    waits = np.array(engine.waits)
    return {
        "episodes_at_once": done,
        "tokens_per_episode": 2 * engine.tokens / (2 * done),
        "rss_before_mib": before,
        "rss_mib_per_1k_episodes": (peaks[0] - before) / done * 1000,
        "rss_second_wave_mib": peaks[1] - peaks[0],
        "p50_wait_ms": 1e3 * float(np.quantile(waits, 0.5)),
        "p99_wait_ms": 1e3 * float(np.quantile(waits, 0.99)),
        "max_wait_ms": 1e3 * float(waits.max()),
        "turns_per_s": 2 * done * TURNS / took,
        "seconds": took,
    }


async def _peak() -> float:
    highest = 0.0
    try:
        while True:
            highest = max(highest, rss_mib())
            await asyncio.sleep(0.25)
    except asyncio.CancelledError:
        return highest


def main() -> None:
    """Measure in a temporary folder and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20.0, help="that the engine takes for a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), options.episodes, options.seconds))))


if __name__ == "__main__":
    main()
