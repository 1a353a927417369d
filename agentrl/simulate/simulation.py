"""A run in virtual time: the real gate, pool, runner and publisher, with engines and a trainer made of costs.

```python
report = simulate(plan, options)     # a `Plan` of `cost` and a run's `RolloutOptions`
print(report.tokens_per_second, report.engine_idle, report.trainer_idle, report.staleness_mean)
```
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.conductor.feed import WeightsReady
from agentrl.conductor.publish import Published, Publisher
from agentrl.errors import RunError
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.pool import Pool, Take
from agentrl.rollout.runner import Runner
from agentrl.simulate.cost import Plan
from agentrl.simulate.engine import Fleet, Line
from agentrl.simulate.world import Batch, VirtualAgent, VirtualEnv, VirtualSession
from agentrl.testing.clock import run_virtual
from agentrl.types import Group, Version

_MEMORY = Path("/dev/shm")
_TAKE_SECONDS = 20.0
_ROWS = 1 << 16
"""They differ in nothing: what a row is like follows from its place in the run."""


@dataclass(frozen=True, slots=True)
class Report:
    """Means over the measured steps, of the whole fleet."""

    steps: int
    seconds: float
    """Virtual, of the measured steps."""
    step_seconds: float
    tokens_per_second: float
    """Sampled tokens that were trained."""
    engine_idle: float
    """The share of its time that an engine has no request, the mean of all engines."""
    engine_paused: float
    engine_prefill: float
    """The share in which it reads contexts, those after publishes included."""
    decode_batch: float
    """Sequences in a decode step."""
    trainer_idle: float
    """The share of its time that the trainer waits for a batch."""
    conductor_busy: float
    """The share of its time that the conductor's event loop has work."""
    train_seconds: float
    """A step's, without the trainer's wait; its fetches from the conductor included."""
    publish_seconds: float
    staleness_mean: float
    """Versions, over trained tokens."""
    staleness_max: int
    several_versions: float
    """The share of episodes with tokens of several versions."""
    stops: dict[str, float]
    """Shares of the trained groups' episodes."""
    fates: dict[str, float]
    """Groups that were filtered, dropped or given up, a step."""
    episode_tokens: float
    """Packed tokens a trained sequence."""


@dataclass(slots=True)
class _Sums:
    waited: float = 0.0
    trained: float = 0.0
    tokens: int = 0
    packed: float = 0.0
    sequences: int = 0
    several: int = 0
    stale: Counter[int] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)


def simulate(
    plan: Plan, options: RolloutOptions, *, steps: int = 8, warmup: int | None = None, seed: int = 0, scale: int = 1
) -> Report:
    """Run `warmup` + `steps` steps and report on the latter. Blocks; deterministic.

    `scale` = k simulates a k-th of the run: k times fewer engines, groups a step and episodes at once, and a trainer to
    which each sequence counts k times. Engines share nothing but the gate, so means stay; what depends on the longest
    of very many episodes is a little too good.
    """
    small = scaled(plan, options, scale)
    warm = warmup if warmup is not None else 2 + min(options.staleness, 6)
    place = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="agentrl-simulate-", dir=place) as scratch, _few_collections():
        return run_virtual(_Simulation(*small, seed=seed, scale=scale).main(Path(scratch), warm, steps))


@contextmanager
def _few_collections() -> Iterator[None]:
    """Thousands of live tasks are walked at each garbage collection, a quarter of the time, and hold no garbage."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def scaled(plan: Plan, options: RolloutOptions, scale: int) -> tuple[Plan, RolloutOptions]:
    """A `scale`-th of a run, see `simulate`."""
    concurrency = options.concurrency
    if plan.engines % scale or options.groups_per_step % scale or (concurrency is not None and concurrency % scale):
        raise ValueError(
            f"scale {scale} must divide {plan.engines} engines, {options.groups_per_step} groups a step and the "
            f"concurrency, {concurrency}"
        )
    changed = {
        "groups_per_step": options.groups_per_step // scale,
        "concurrency": None if concurrency is None else concurrency // scale,
        "epochs": None,  # the number of rows is not a simulation's to know
    }
    small = RolloutOptions.model_validate({**options.model_dump(exclude_unset=True), **changed})
    return replace(plan, engines=plan.engines // scale), small


class _Simulation:
    def __init__(self, plan: Plan, options: RolloutOptions, *, seed: int, scale: int) -> None:
        self._plan, self._options, self._seed, self._scale = plan, options, seed, scale
        self._version = Version(1, 0)
        self._sums = _Sums()
        self._finished: dict[int, Group] = {}
        """The groups in the pool: decoding them from it again would be a sixth of a simulation's time."""

    async def main(self, scratch: Path, warmup: int, steps: int) -> Report:
        self._fleet = fleet = Fleet(
            self._plan.engines, self._plan.engine, self._version, interrupt=self._plan.interrupt
        )
        pool = await Pool.open(scratch / "pool.sqlite")
        self._line = line = Line()
        work = self._plan.work
        call = self._scale * self._plan.conductor.request  # each call stands for as many
        self._runner = runner = Runner(
            self._options,
            pool=pool,
            rows=[{}] * _ROWS,
            seed=self._seed,
            env="simulated",
            make_env=lambda row: VirtualEnv(row, work),
            make_agent=VirtualAgent,
            open_session=lambda spec: VirtualSession(fleet, line, call, work, spec),
            on_group=self._on_group,
        )
        await runner.start(self._version)
        self._publisher = Publisher(fleet.publish, self._on_published, lambda _: None, owned=scratch / "weights")
        tasks = [asyncio.create_task(runner.run()), asyncio.create_task(self._publisher.run())]
        try:
            for step in range(1, warmup + 1):
                await self._step(step)
            self._begin()
            begin = asyncio.get_running_loop().time()
            for step in range(warmup + 1, warmup + steps + 1):
                await self._step(step)
            return self._report(steps, asyncio.get_running_loop().time() - begin)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await pool.close()

    async def _step(self, step: int) -> None:
        """What the training loop does, in its order: take, train, hand the weights over."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        take = await self._take(step)
        self._sums.waited += loop.time() - begin
        begin = loop.time()
        for _ in take.ids:
            await self._line.work(self._scale * self._plan.conductor.group)
        fetched = loop.time() - begin
        batch = Batch([self._finished.pop(position) for position in take.ids], self._version.number)
        cost = self._plan.train
        busy = cost.step(batch.lengths) + (self._scale - 1) * (cost.step(batch.lengths) - cost.fixed) + cost.hand_over
        await asyncio.sleep(busy)
        self._add(batch, busy + fetched)
        self._version = Version(1, step)
        label = str(self._version)
        self._publisher.offer(WeightsReady(step=step, version=label, path=label, seconds=cost.hand_over))
        await self._runner.retain(take.cursor)

    async def _take(self, step: int) -> Take:
        while True:
            take = await self._runner.take(step, self._version, _TAKE_SECONDS)
            if take is not None:
                return take
            if self._runner.over:
                raise RunError("the simulated run has no rows left: rollout.epochs ends it before it was measured")

    def _on_group(self, group: Group, fate: str) -> None:
        if fate == "pooled":
            self._finished[group.id] = group

    async def _on_published(self, done: Published[Version]) -> None:
        await self._runner.published(done.version)

    def _add(self, batch: Batch, busy: float) -> None:
        sums = self._sums
        sums.trained += busy
        sums.tokens += batch.sampled
        sums.packed += sum(batch.lengths)
        sums.sequences += len(batch.lengths)
        sums.several += batch.several
        sums.stale += batch.stale
        sums.stops += batch.stops

    def _begin(self) -> None:
        self._sums = _Sums()
        self._counts = Counter(self._runner.counts)
        self._fleet.publish_seconds = 0.0
        self._used = self._line.busy()
        for engine in self._fleet.engines:
            engine.reset()

    def _report(self, steps: int, seconds: float) -> Report:
        sums, gauges = self._sums, [engine.measure() for engine in self._fleet.engines]
        whole = seconds * len(gauges)
        stale = sum(sums.stale.values()) or 1
        counts = self._runner.counts - self._counts
        return Report(
            steps=steps,
            seconds=seconds,
            step_seconds=seconds / steps,
            tokens_per_second=self._scale * sums.tokens / seconds,
            engine_idle=sum(g.idle for g in gauges) / whole,
            engine_paused=sum(g.paused for g in gauges) / whole,
            engine_prefill=sum(g.prefill for g in gauges) / whole,
            decode_batch=sum(g.tokens for g in gauges) / max(sum(g.steps for g in gauges), 1e-9),
            trainer_idle=sums.waited / seconds,
            conductor_busy=(self._line.busy() - self._used) / seconds,
            train_seconds=sums.trained / steps,
            publish_seconds=self._fleet.publish_seconds / steps,
            staleness_mean=sum(age * n for age, n in sums.stale.items()) / stale,
            staleness_max=max(sums.stale, default=0),
            several_versions=sums.several / max(sums.sequences, 1),
            stops={stop: n / max(sums.stops.total(), 1) for stop, n in sorted(sums.stops.items())},
            fates={
                fate: self._scale * counts[fate] / steps
                for fate in ("filtered", "dropped", "given_up", "untrained")
                if counts[fate]
            },
            episode_tokens=sums.packed / max(sums.sequences, 1),
        )
