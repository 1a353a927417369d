"""`agentrl eval`: the rows of one or several data sets, k episodes each, by a model behind an OpenAI-compatible URL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrl.evaluate.api import ApiSession
from agentrl.evaluate.saved import AGAIN, Key, Saved, row_keys, to_line
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.player import Player, Sampling
from agentrl.rollout.schedule import stable_seed
from agentrl.rollout.session import MakeAgent, MakeEnv
from agentrl.types import Row

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """Whom to ask, and how. `settings` go with each call: `max_tokens`, for one."""

    base_url: str
    name: str
    api_key: str = "none"
    temperature: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play: k episodes a row. `save` is a folder; `about` is kept with the episodes and must not change."""

    make_env: MakeEnv
    make_agent: MakeAgent
    sets: Mapping[str, Sequence[Row]]
    k: int = 1
    seed: int = 0
    concurrency: int = 16
    max_turns: int = 16
    time_limit: float = 600.0
    save: Path | None = None
    resume: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


class _Asked(NamedTuple):
    name: str
    row: int
    sample: int
    key: Key


async def evaluate_api(
    plan: Plan, model: Model, *, on_line: Callable[[str, Line], None] = lambda name, line: None
) -> dict[str, list[list[Line]]]:
    """Play; for each data set and row the lines of its episodes, as `evaluate.saved` describes them.

    The environment's seed is the row's, the same for its k episodes and in every evaluation with this seed.
    """
    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=2)
    player = Player(
        RolloutOptions(max_turns=plan.max_turns, time_limit=plan.time_limit),
        make_env=plan.make_env,
        make_agent=plan.make_agent,
        open_session=lambda spec: ApiSession(client, model.name, spec, model.settings),
    )
    files = _files(plan)
    lines: dict[str, list[list[Line]]] = {name: [[] for _ in rows] for name, rows in plan.sets.items()}
    room = asyncio.Semaphore(plan.concurrency)

    async def play(asked: _Asked) -> None:
        digest, copy, _ = asked.key
        spec = EpisodeSpec(
            asked.row,
            asked.sample,
            0,
            stable_seed("evaluation", plan.seed, digest, copy),
            plan.sets[asked.name][asked.row],
        )
        async with room:
            outcome = await player.play(spec, Sampling(f"eval-{asked.name}", None, False, model.temperature))
        file = files.get(asked.name)
        line = file.write(asked.key, outcome.episode) if file else to_line(asked.key, outcome.episode)
        lines[asked.name][asked.row].append(line)
        on_line(asked.name, line)

    try:
        async with asyncio.TaskGroup() as group:
            for asked in _asked(plan):
                known = files[asked.name].done(asked.key) if asked.name in files else None
                if known is None:
                    group.create_task(play(asked))
                else:
                    lines[asked.name][asked.row].append(known)
                    on_line(asked.name, known)
    finally:
        for file in files.values():
            file.close()
        await client.close()
    return lines


def rewards_of(rows: Sequence[Sequence[Line]]) -> list[list[float | None]]:
    """The rewards of each row's episodes, for `summarize`."""
    return [[line["reward"] for line in row] for row in rows]


class Bar:
    """A progress bar on stderr, with the mean reward so far."""

    def __init__(self, plan: Plan) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[mean]}"),
        )
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._tasks = {
            name: self._progress.add_task(name, total=len(rows) * plan.k, mean="") for name, rows in plan.sets.items()
        }
        self._rewards: dict[str, list[float]] = {name: [] for name in plan.sets}
        self._lost: dict[str, int] = dict.fromkeys(plan.sets, 0)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, name: str, line: Line) -> None:
        """An episode of a data set is there."""
        if line["reward"] is not None:
            self._rewards[name].append(line["reward"])
        self._lost[name] += line["stop"] in AGAIN
        rewards, lost = self._rewards[name], self._lost[name]
        mean = f"reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        self._progress.update(self._tasks[name], advance=1, mean=mean + (f", {lost} lost" if lost else ""))


def _files(plan: Plan) -> dict[str, Saved]:
    if plan.save is None:
        return {}
    return {name: Saved(plan.save, name, plan.about, resume=plan.resume) for name in plan.sets}


def _asked(plan: Plan) -> list[_Asked]:
    """Sample by sample, so that an evaluation that is cut short has seen all rows."""
    keys = {name: row_keys(rows) for name, rows in plan.sets.items()}
    return [
        _Asked(name, row, sample, Key(*keys[name][row], sample))
        for sample in range(plan.k)
        for name, rows in plan.sets.items()
        for row in range(len(rows))
    ]
