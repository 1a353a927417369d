"""Rewards that compare the episodes of a group with each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agentrl.calling import call
from agentrl.errors import ContractError
from agentrl.reward.score import Score
from agentrl.types import Episode, Group, Turn

GroupReward = Callable[[Sequence[Episode]], Sequence[float | Score] | Awaitable[Sequence[float | Score]]]
"""`def f(episodes) -> [one number or Score an episode]`, of the scored episodes of one group, in their order.

A plain `def` runs in a thread."""


async def reward_group(group: Group, reward: GroupReward, *, name: str = "group") -> Group:
    """The group with each scored episode's last turn earning so much more; logged as the turn's part `name`.

    An episode whose score is `Score(None)` loses its verdict. Episodes without one are not shown to `reward`.
    """
    scored = [episode for episode in group.episodes if episode.scored and episode.turns]
    given = list(await call(reward, scored))
    if len(given) != len(scored):
        raise ContractError(f"{reward!r} gave {len(given)} rewards for {len(scored)} episodes: give one each, in order")
    earned = {id(episode): found for episode, found in zip(scored, given, strict=True)}
    return replace(
        group,
        episodes=tuple(_with(e, _score(earned[id(e)]), name) if id(e) in earned else e for e in group.episodes),
    )


def _score(value: float | Score) -> Score:
    return value if isinstance(value, Score) else Score(value)


def _with(episode: Episode, score: Score, name: str) -> Episode:
    last: Turn = episode.turns[-1]
    parts = {**last.parts, **{f"{name}/{inner}": value for inner, value in score.parts.items()}}
    if score.value is None:
        turn = replace(last, reward=None, parts=parts)
    else:
        turn = replace(last, reward=(last.reward or 0.0) + score.value, parts={**parts, name: score.value})
    return replace(episode, turns=(*episode.turns[:-1], turn))
