"""Several agents in one episode: whose a step's reward is, where not all of it is the acting agent's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from agentrl.errors import ContractError
from agentrl.types import Info, Turn


def checked_shares(info: Info, reward: float | None) -> dict[str, float]:
    """`info["agent_rewards"]`: the step's reward by the name of the agent that it belongs to; empty where not given.

    ContractError where they are no numbers or do not add up to the step's reward.
    """
    shares = info.get("agent_rewards")
    if shares is None:
        return {}
    if not isinstance(shares, Mapping) or not all(
        isinstance(share, int | float) and math.isfinite(share) for share in shares.values()
    ):
        raise ContractError(f"info['agent_rewards'] must be a dict of agents' names and finite numbers, got {shares!r}")
    total = sum(shares.values())
    if reward is None or abs(total - reward) > 1e-6 * max(1.0, abs(total)):
        raise ContractError(
            f"info['agent_rewards'] = {dict(shares)} add up to {total}, and the step's reward is {reward}: "
            "they say whose the reward is, so they must be equal"
        )
    return {str(name): float(share) for name, share in shares.items()}


def share_out(turns: list[Turn], shares: Mapping[str, float]) -> None:
    """Move each share from the newest turn to the latest one of its agent; an agent that has not acted has none.

    `turns` change in place; what nobody else gets stays with the newest turn.
    """
    newest = turns[-1]
    kept = newest.reward or 0.0
    for name, share in shares.items():
        theirs = [i for i, turn in enumerate(turns) if turn.agent == name and turn.index < newest.index]
        if name == newest.agent or not theirs or turns[theirs[-1]].reward is None:
            continue
        turns[theirs[-1]] = replace(turns[theirs[-1]], reward=(turns[theirs[-1]].reward or 0.0) + share)
        kept -= share
    if newest.reward is not None:
        turns[-1] = replace(newest, reward=kept)
