"""From the rewards of a group to a value for each episode and turn: plain numbers, no tensors."""

from __future__ import annotations

from agentrl.train import functional
from agentrl.train.manifest import EpisodeEntry, GroupEntry
from agentrl.train.options import AlgorithmOptions


def turn_rewards(episode: EpisodeEntry, options: AlgorithmOptions) -> dict[int, float]:
    """The reward of each turn, by index: scaled, clipped, and the penalty on length taken from the last."""
    found: dict[int, float] = {}
    for turn in episode.turns:
        reward = (turn.reward or 0.0) * options.reward_scale
        if options.reward_clip is not None:
            reward = min(max(reward, -options.reward_clip), options.reward_clip)
        found[turn.index] = found.get(turn.index, 0.0) + reward
    if found and options.overlong_tokens is not None:
        length = sum(t.sampled for t in episode.trajectories if not t.abandoned)
        found[max(found)] += functional.overlong_penalty(
            length, options.overlong_tokens, options.overlong_buffer, options.overlong_penalty
        )
    return found


def group_credit(group: GroupEntry, options: AlgorithmOptions) -> list[dict[int, float]]:
    """The advantage of each episode and turn against its group, as the options say; {} where there is no verdict."""
    rewards = [turn_rewards(e, options) if e.scored else None for e in group.episodes]
    if options.agents == "together":
        return _advantages(rewards, options)
    found: list[dict[int, float]] = [{} for _ in rewards]
    for name in sorted({turn.agent for episode in group.episodes for turn in episode.turns}):
        # An episode in which the agent never acted says nothing of it.
        own = [_own(e, r, name) or None for e, r in zip(group.episodes, rewards, strict=True)]
        for whole, part in zip(found, _advantages(own, options), strict=True):
            whole.update(part)
    return found


def _own(episode: EpisodeEntry, rewards: dict[int, float] | None, agent: str) -> dict[int, float]:
    acted = {turn.index for turn in episode.turns if turn.agent == agent}
    return {index: reward for index, reward in (rewards or {}).items() if index in acted}


def _advantages(rewards: list[dict[int, float] | None], options: AlgorithmOptions) -> list[dict[int, float]]:
    if options.credit == "turn":
        ahead = [None if r is None else functional.returns_to_go(r, options.discount) for r in rewards]
        return functional.turn_advantages(ahead, options.baseline)
    totals = [None if r is None else sum(r.values()) for r in rewards]
    advantages = functional.group_advantages(totals, options.baseline)
    return [{} if r is None else dict.fromkeys(r, a) for r, a in zip(rewards, advantages, strict=True)]
