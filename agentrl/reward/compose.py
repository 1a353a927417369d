"""Rewards made of named, weighted parts, from Python or from a run's TOML."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config import resolve_object
from agentrl.errors import ConfigError, ContractError, DeadlineExceeded
from agentrl.reward.options import PartOptions
from agentrl.reward.score import Reward, Score, score
from agentrl.reward.workers import NoWorker, WorkerLost, shared_pool
from agentrl.types import Row


@dataclass(frozen=True, slots=True)
class Part:
    """A reward, how much it counts, and how long it may take. With weight 0 it is logged only."""

    reward: Reward
    weight: float = 1.0
    seconds: float = 30.0


class Composed:
    """The weighted sum of its parts, which run side by side; itself a reward `(completion, row) -> Score`.

    ```python
    reward = Composed({"correct": Part(MathReward()), "brief": Part(lambda text, row: len(text) < 400, 0.1)})
    ```

    `parts` of the score holds every part's value by name, unweighted, and what a part reports of its own as
    `name/part`. A part without a verdict leaves the whole without one, unless its weight is 0.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        if not parts:
            raise ContractError("a composed reward without parts: give at least one")
        if all(part.weight == 0 for part in parts.values()):
            raise ContractError(f"all parts have weight 0 ({', '.join(parts)}): the reward would always be 0")
        self.parts = dict(parts)

    async def __call__(self, completion: str, row: Row) -> Score:
        scores = await asyncio.gather(*(_scored(name, part, completion, row) for name, part in self.parts.items()))
        logged: dict[str, float] = {}
        info: dict[str, Any] = {}
        total: float | None = 0.0
        for (name, part), found in zip(self.parts.items(), scores, strict=True):
            logged |= {f"{name}/{inner}": value for inner, value in found.parts.items()}
            info |= found.info
            if found.value is not None:
                logged[name] = found.value
                total = None if total is None else total + part.weight * found.value
            elif part.weight:
                total = None
                info.setdefault("no_verdict", name)
        return Score(total, logged, info)


def compose(settings: Mapping[str, Any]) -> Composed:
    """The reward that a TOML table describes: a table of `PartOptions` by name.

    ```toml
    [env.args.rewards]
    correct = {path = "agentrl.reward.math:MathReward", args = {marker = "boxed"}}
    brief = {path = "my_rewards.py:brief", weight = 0.1}
    ```
    """
    parts = {}
    for name, given in settings.items():
        options = given if isinstance(given, PartOptions) else _options(name, given)
        parts[name] = Part(_reward(name, options), options.weight, options.seconds)
    return Composed(parts)


def shared(settings: Mapping[str, Any]) -> Composed:
    """`compose`, once for equal settings: a judge's budget and connections belong to all episodes of a run."""
    return _shared(json.dumps(settings, sort_keys=True))


@functools.cache
def _shared(settings: str) -> Composed:
    return compose(json.loads(settings))


def _options(name: str, given: Any) -> PartOptions:
    if not isinstance(given, Mapping):
        raise ConfigError(f"reward {name!r} is {given!r}, expected a table such as {{path = 'my_rewards.py:f'}}")
    try:
        return PartOptions.model_validate(dict(given))
    except ValueError as error:
        raise ConfigError(f"reward {name!r}: {error}") from error


def _reward(name: str, options: PartOptions) -> Reward:
    found = resolve_object(options.path)
    if not callable(found):
        raise ConfigError(f"reward {name!r}: {options.path} is a {type(found).__name__}, expected a function or class")
    if options.worker:
        if inspect.isclass(found) or inspect.iscoroutinefunction(found):
            raise ConfigError(f"reward {name!r}: worker = true needs a plain function, {options.path} is none")
        return _InWorker(options)
    if inspect.isclass(found):
        try:
            return _checked(name, found(**options.args))
        except TypeError as error:
            raise ConfigError(f"reward {name!r}: {options.path} does not take args {options.args}: {error}") from error
    if not options.args:
        return _checked(name, found)

    async def with_args(completion: str, row: Row) -> Score:
        return await score(found, completion, row, **options.args)

    return with_args


def _checked(name: str, reward: Any) -> Reward:
    if not callable(reward):
        raise ConfigError(f"reward {name!r}: its objects cannot be called; define __call__(self, completion, row)")
    found: Reward = reward
    return found


class _InWorker:
    def __init__(self, options: PartOptions) -> None:
        self._options = options

    async def __call__(self, completion: str, row: Row) -> Score:
        options = self._options
        found = await shared_pool().acall(options.path, completion, dict(row), seconds=options.seconds, **options.args)
        return Score(**found) if isinstance(found, dict) else await score(lambda: found)


async def _scored(name: str, part: Part, completion: str, row: Row) -> Score:
    """The part's score; a part that is too slow, or whose worker is lost, has no verdict."""
    try:
        async with asyncio.timeout(part.seconds if not isinstance(part.reward, _InWorker) else None):
            return await score(part.reward, completion, row)
    except (TimeoutError, DeadlineExceeded) as error:
        return Score(None, {}, {f"{name}_error": f"no verdict within {part.seconds:g} s: {error}"})
    except (NoWorker, WorkerLost) as error:
        return Score(None, {}, {f"{name}_error": str(error)})
