"""Evaluation on held-out rows beside the rollouts: the same loop, sessions not for training, versions noted."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from agentrl.conductor.config import EvalSection
from agentrl.conductor.desk import Desk
from agentrl.conductor.watchdog import Watchdog
from agentrl.data import env_of
from agentrl.rollout.episode import EpisodeSpec, Outcome
from agentrl.rollout.player import Plays, Sampling
from agentrl.rollout.schedule import stable_seed
from agentrl.types import Episode, Row, Sampled


class Evaluation(NamedTuple):
    """What held-out episodes earned. `versions` are the labels of all weights that answered."""

    reward: float | None
    scored: int
    episodes: int
    versions: tuple[str, ...]
    stops: dict[str, int]
    turns: float
    error: str | None
    deviation: float | None = None
    """The standard error of `reward`, over the means of rows; None where there is one row."""
    envs: dict[str, dict[str, float]] | None = None
    """Of a mixture: the figures of each environment by its name."""

    def metrics(self) -> dict[str, object]:
        """For metrics.jsonl."""
        return {
            "eval/reward": self.reward,
            "eval/scored": self.scored,
            "eval/episodes": self.episodes,
            "eval/turns_mean": self.turns,
            "eval/versions": list(self.versions),
            "eval/stops": self.stops,
            "eval/error": self.error,
            "eval/reward_error": self.deviation,
            **({"envs": self.envs} if self.envs else {}),
        }


async def evaluate(
    player: Plays,
    rows: Sequence[Row],
    *,
    name: str,
    samples: int,
    seed: int,
    temperature: float,
    concurrency: int,
    on_row: Callable[[int, tuple[Episode, ...]], None] = lambda *_: None,
) -> Evaluation:
    """Play every row `samples` times, with seeds that depend on the run's seed and the row alone.

    `on_row` is told of the episodes of each row, when all are played.
    """
    room = asyncio.Semaphore(concurrency)

    async def one(index: int, sample: int) -> Outcome:
        spec = EpisodeSpec(index, sample, 0, stable_seed("evaluation", seed, index), rows[index])
        sampling = Sampling(name, stable_seed("evaluation sample", seed, index, sample), False, temperature)
        async with room:
            return await player.play(spec, sampling)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, s)) for i in range(len(rows)) for s in range(samples)]
    episodes = [task.result().episode for task in tasks]
    for index in range(len(rows)):
        on_row(index, tuple(episodes[index * samples : (index + 1) * samples]))
    rewards = [e.reward for e in episodes if e.reward is not None]
    segments = [s for e in episodes for t in e.trajectories for s in t.segments]
    versions = {s.source.version for s in segments if isinstance(s.source, Sampled)}
    return Evaluation(
        reward=sum(rewards) / len(rewards) if rewards else None,
        scored=len(rewards),
        episodes=len(episodes),
        versions=tuple(str(v) for v in sorted(versions)),
        stops=dict(Counter(e.stop.value for e in episodes)),
        turns=sum(len({t.index for t in e.turns}) for e in episodes) / max(len(episodes), 1),
        error=next((e.error for e in episodes if e.reward is None and e.error), None),
        deviation=_standard_error(episodes),
        envs=_by_environment(episodes),
    )


def _by_environment(episodes: Sequence[Episode]) -> dict[str, dict[str, float]] | None:
    names = sorted({env_of(episode.row, "") for episode in episodes} - {""})
    if not names:
        return None
    found = {}
    for name in names:
        mine = [episode for episode in episodes if env_of(episode.row, "") == name]
        rewards = [episode.reward for episode in mine if episode.reward is not None]
        found[name] = {"eval_scored": float(len(rewards))}
        if rewards:
            found[name]["eval_reward"] = fmean(rewards)
        if (error := _standard_error(mine)) is not None:
            found[name]["eval_reward_error"] = error
    return found


def _standard_error(episodes: Sequence[Episode]) -> float | None:
    rows: dict[int, list[float]] = {}
    for episode in episodes:
        if episode.reward is not None:
            rows.setdefault(episode.group, []).append(episode.reward)
    means = [fmean(rewards) for rewards in rows.values()]
    return stdev(means) / len(means) ** 0.5 if len(means) > 1 else None


class Evaluator:
    """One evaluation at a time; where one still runs, the newest one that fell due meanwhile follows it."""

    def __init__(
        self,
        options: EvalSection,
        player: Plays,
        rows: Sequence[Row],
        seed: int,
        desk: Desk,
        watchdog: Watchdog,
        on_end: Callable[[asyncio.Task[None]], None],
        on_row: Callable[[int, int, tuple[Episode, ...]], None] = lambda *_: None,
        pin: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`on_row` is told of the step, the row's place, and its episodes; `pin` loads a step's weights first."""
        self._options, self._player, self._rows, self._seed = options, player, rows, seed
        self._desk, self._watchdog, self._on_end = desk, watchdog, on_end
        self._on_row = on_row
        self._pin = pin
        self._due: list[int] = []
        self._task: asyncio.Task[None] | None = None
        self._count = itertools.count()

    def due(self, step: int) -> None:
        """Evaluate now, beside everything else."""
        self._due = [step]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._on_end)

    async def last(self, step: int) -> None:
        """Finish what runs, then evaluate the end of the run and wait for it."""
        self._due = []
        if self._task is not None:
            with self._watchdog.waiting("the conductor", "the evaluation that still runs"):
                await self._task
        await self._one(step)

    async def stop(self) -> None:
        """Drop what runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._due:
            await self._one(self._due.pop(0))

    async def _one(self, step: int) -> None:
        begin = time.monotonic()
        with self._watchdog.waiting("the conductor", f"the evaluation of step {step}"):
            if self._pin is not None:
                await self._pin(step)
            result = await evaluate(
                self._player,
                self._rows,
                # Unique in the process: sessions of two evaluations must not share a name.
                name=f"eval{next(self._count)}-{step}",
                samples=self._options.samples,
                seed=self._seed,
                temperature=self._options.temperature,
                concurrency=self._options.concurrency,
                on_row=lambda index, episodes: self._on_row(step, index, episodes),
            )
        self._watchdog.beat(f"evaluation of step {step}")
        self._desk.metrics.write("eval", {"step": step, **result.metrics(), "eval/seconds": time.monotonic() - begin})
        if result.reward is None:
            self._desk.note(f"evaluation at step {step}: no episode was scored: {result.stops}; {result.error}")
        else:
            self._desk.note(f"evaluation at step {step}: reward {result.reward:.3f} over {result.scored} episodes")
