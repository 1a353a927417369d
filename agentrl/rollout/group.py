"""One group: its samples side by side, stragglers and hopeless ones cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.config import resolve_object
from agentrl.errors import ConfigError
from agentrl.reward.group import GroupReward, reward_group
from agentrl.rollout.episode import EpisodeSpec, Outcome
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.player import Plays, Sampling, unplayed
from agentrl.rollout.records import Ask
from agentrl.rollout.schedule import Place, sampling_seed
from agentrl.types import Group, Row, Stop
from agentrl.wire import legible


@dataclass(slots=True)
class RunningGroup:
    """A group that runs. `oldest` is the smallest version any of its tokens can have; None before the first action."""

    ask: Ask
    place: Place
    seed: int
    row: Row
    began: float
    expired: asyncio.Future[None]
    oldest: int | None = None
    done: int = 0
    acted: dict[int, float] = field(default_factory=dict)

    def expire(self) -> None:
        """Nothing of it can be trained any more: stop playing."""
        if not self.expired.done():
            self.expired.set_result(None)

    def state(self, now: float) -> str:
        """What it is doing, for a status line."""
        last = f", last action {now - max(self.acted.values()):.0f} s ago" if self.acted else ", no action yet"
        return f"{self.done} episodes done{last}"


async def play_group(
    group: RunningGroup,
    player: Plays,
    options: RolloutOptions,
    *,
    seed: int,
    run: str,
    newest: Callable[[], int],
    on_episode: Callable[[], None],
) -> list[Outcome] | None:
    """Play all samples; None where the group expired.

    Ends when enough are scored, when all ended, or `straggler_seconds` after `needed` were scored. `newest` is the
    version that the engines are known to serve.
    """
    loop = asyncio.get_running_loop()

    async def play(spec: EpisodeSpec) -> Outcome:
        def act() -> None:
            group.acted[spec.sample] = loop.time()
            if group.oldest is None:
                group.oldest = newest()

        sampling = Sampling(
            run, sampling_seed(seed, group.place, group.ask.attempt, spec.sample), True, options.temperature
        )
        return await player.play(spec, sampling, on_act=act)

    tasks: _Tasks = {}
    for sample in range(options.started):
        spec = EpisodeSpec(group.ask.position, sample, group.ask.attempt, group.seed, group.row)
        tasks[asyncio.create_task(play(spec), name=f"group {spec.group} sample {sample}")] = spec
    outcomes: dict[int, Outcome] = {}
    try:
        if not await _collect(group, tasks, outcomes, options, on_episode):
            return None
    finally:
        await cancel_all(tasks, 2 * options.close_seconds + 5.0)
    for spec in tasks.values():
        outcomes[spec.sample] = Outcome(unplayed(spec, Stop.CANCELLED, "cut off: the group went on without it"))
    return [outcomes[sample] for sample in sorted(outcomes)]


_Tasks = dict[asyncio.Task[Outcome], EpisodeSpec]


async def _collect(
    group: RunningGroup,
    tasks: _Tasks,
    outcomes: dict[int, Outcome],
    options: RolloutOptions,
    on_episode: Callable[[], None],
) -> bool:
    """Move ended tasks to `outcomes` until the group can go; False where it expired."""
    loop = asyncio.get_running_loop()
    until = loop.time() + options.longest
    hurried = False
    while tasks:
        waited: list[asyncio.Future[Any]] = [*tasks, group.expired]
        done, _ = await asyncio.wait(waited, timeout=max(0.0, until - loop.time()), return_when=asyncio.FIRST_COMPLETED)
        if group.expired.done():
            return False
        if not done:
            break  # time is up for stragglers, or an episode ignored its own limits
        for task in [task for task in tasks if task in done]:
            spec = tasks.pop(task)
            outcomes[spec.sample] = _result(task, spec)
            group.done += 1
            on_episode()
        scored = sum(outcome.episode.scored for outcome in outcomes.values())
        if scored >= options.samples:
            break
        if options.straggler_seconds is not None and scored >= options.needed and not hurried:
            hurried, until = True, min(until, loop.time() + options.straggler_seconds)
    return True


def group_reward_of(options: RolloutOptions) -> GroupReward | None:
    """What `rollout.group_reward` names; ConfigError where that is nothing to call."""
    if options.group_reward is None:
        return None
    found = resolve_object(options.group_reward)
    if not callable(found):
        raise ConfigError(f"rollout.group_reward = {options.group_reward!r} is {found!r}, not a function of episodes")
    reward: GroupReward = found
    return reward


async def compared(group: Group, reward: GroupReward) -> tuple[Group, Exception | None]:
    """The group with what `reward` adds; where it raised, nobody has a verdict, and what it raised."""
    try:
        return await reward_group(group, reward), None
    except Exception as error:
        # The user's code, as an environment's is: a bad reward is data, and too many of them end the run.
        text = legible(f"the group reward raised {type(error).__name__}: {error}")
        failed = tuple(replace(e, stop=Stop.ENV_ERROR, error=text) if e.scored else e for e in group.episodes)
        return replace(group, episodes=failed), error


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], seconds: float) -> None:
    """Cancel them and wait up to `seconds`; one that does not end by then is left alone."""
    pending = [task for task in tasks if task is not asyncio.current_task()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=seconds)
    for task in pending:
        task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _result(task: asyncio.Task[Outcome], spec: EpisodeSpec) -> Outcome:
    if task.cancelled():
        return Outcome(unplayed(spec, Stop.CANCELLED, "the environment or the agent cancelled its own task"))
    error = task.exception()
    if isinstance(error, Exception):
        text = f"the episode loop raised {type(error).__name__}: {error}"
        return Outcome(unplayed(spec, Stop.ENGINE_LOST, text), error)
    return task.result()
