"""Translator 2: trajectories of tokens to packed tensors. Nothing else turns one into the other.

T tokens of S sequences, one after the other and without padding; `cu_seqlens` says where each begins and ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import RunError
from agentrl.train.plan import Item
from agentrl.types import Demonstration, Episode, Group, Sampled, Trajectory

Credit = Sequence[Mapping[int, float]]
"""What an algorithm's `credit` gives for a group: for each episode, a value a turn index. The tokens of a turn that it
leaves out are not trained and count in no denominator."""
EPISODES = 1_000_000
"""`Batch.episodes` is the group's place in the step times this, plus the episode's place in the group."""
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed forward pass. Everything is `[T]` unless it says otherwise."""

    tokens: Tensor
    """int64"""
    positions: Tensor
    """int64, 0 at each sequence's start"""
    cu_seqlens: Tensor
    """int32 `[S+1]`, on the CPU"""
    mask: Tensor
    """bool: the tokens whose log-prob the loss is about; never a sequence's first"""
    behaviour: Tensor
    """float32 log-probs at the sampling temperature; 0 off the mask"""
    temperatures: Tensor
    """float32; 1 off the mask"""
    staleness: Tensor
    """int32: versions between the weights that sampled the token and the ones that train it; 0 off the mask"""
    queued: Tensor
    """int32: of these, how many passed after the episode's newest token was sampled (the rest, while it ran)"""
    turns: Tensor
    """int32 turn index; -1 where the token belongs to no action"""
    episodes: Tensor
    """int64, the same for all tokens of an episode, different for different episodes of a step"""
    trajectories: Tensor
    """int32: the sequence's place among its episode's trajectories"""
    groups: Tensor
    """int64 group id"""
    credit: Tensor
    """float32: the value that the algorithm's `credit` gave the token's turn; 0 off the mask"""
    episode_tokens: Tensor
    """float32: how many tokens of the whole episode are on a mask, wherever they are packed"""
    weights: Tensor
    """float32: weight of the token in the step's loss, its denominators included; 0 until `with_weights`"""
    advantages: Tensor
    """float32; 0 until `with_advantages`"""
    proximal: Tensor | None = None
    """float32 log-probs under the weights at the step's start; None where these are the training forward's own"""
    values: Tensor | None = None
    """float32: the critic's values at the step's start, of the state before the token; None without a critic"""
    returns: Tensor | None = None
    """float32: what the critic is to predict; None without a critic"""
    reference: Tensor | None = None
    """float32 log-probs under the reference policy; None where the algorithm wants none"""

    @property
    def sequences(self) -> Tensor:
        """int64: which of the packed sequences each token lies in, from 0."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(self.tokens.device)

    @property
    def trained(self) -> Tensor:
        """int64 `[N]`: the tokens on the mask, or one that is not where there are none.

        A batch that trains nothing still passes through every weight, or ZeRO-3's ranks would fall out of step.
        """
        rows = self.mask.nonzero().squeeze(1)
        return rows if len(rows) else torch.ones(1, dtype=torch.int64, device=rows.device)

    def with_weights(self, weights: Tensor) -> Batch:
        """A copy with the loss weights filled in."""
        return replace(self, weights=weights)

    def with_advantages(self, advantages: Tensor, returns: Tensor | None = None) -> Batch:
        """A copy with the advantages filled in, and the critic's targets where there is one."""
        return replace(self, advantages=advantages, returns=returns)

    def with_proximal(self, proximal: Tensor, values: Tensor | None = None) -> Batch:
        """A copy with the proximal log-probs filled in, and the values where there is a critic."""
        return replace(self, proximal=proximal, values=values)

    def with_reference(self, reference: Tensor) -> Batch:
        """A copy with the reference's log-probs filled in."""
        return replace(self, reference=reference)

    def to(self, device: torch.device) -> Batch:
        """A copy on `device`; `cu_seqlens` stays on the CPU."""
        moved = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor) and name != "cu_seqlens"
        }
        return replace(self, **moved)


class Columns:
    """The arrays of one sequence, `[length]` each, before they are joined."""

    def __init__(
        self,
        group: Group,
        item: Item,
        credit: Mapping[int, float],
        version: int,
        demonstrations: bool,
        longest: int | None,
    ):
        episode = group.episodes[item.episode]
        trajectory = episode.trajectories[item.trajectory]
        n = len(trajectory)
        self.tokens = trajectory.tokens.astype(np.int64)
        self.turns = turn_indices(episode, item.trajectory)
        trained = None if demonstrations else credit
        self.mask = train_mask(episode, item.trajectory, self.turns, trained)
        self.behaviour = np.where(self.mask, trajectory.logprobs, np.float32(0))
        self.temperatures = np.where(self.mask, trajectory.temperatures, np.float32(1))
        sampled = self.mask & (trajectory.versions >= 0)
        self.staleness = np.where(sampled, version - trajectory.versions, 0)
        self.queued = np.where(sampled, version - newest_version(episode), 0)
        self.credit = np.where(self.mask, _of_turns(self.turns, credit), np.float32(0))
        self.episodes = np.full(n, item.group * EPISODES + item.episode, np.int64)
        self.trajectories = np.full(n, item.trajectory, np.int32)
        self.groups = np.full(n, group.id, np.int64)
        self.episode_tokens = np.full(n, trained_tokens(episode, trained, longest), np.float32)
        self.positions = np.arange(n, dtype=np.int64)


def turn_indices(episode: Episode, place: int) -> NDArray[np.int32]:
    """The turn index of each token of a trajectory `[n]`: of the first mark that ends after it, -1 past the last."""
    turns = np.full(len(episode.trajectories[place]), -1, np.int32)
    start = 0
    for mark in sorted((t for t in episode.turns if t.trajectory == place), key=lambda t: t.end):
        turns[start : mark.end] = mark.index
        start = max(start, mark.end)
    return turns


def train_mask(episode: Episode, place: int, turns: NDArray[np.int32], credit: Mapping[int, float] | None) -> BoolArray:
    """Which tokens of a trajectory the loss is about `[n]`. `credit` None: demonstrations, for an imitating algorithm.

    Else sampled tokens of an action that has credit, at a temperature above 0 (greedy choices have no log-prob to
    correct). The first token has no context that could predict it.
    """
    trajectory = episode.trajectories[place]
    mask = np.concatenate(
        [np.full(len(s), _trains(s.source, credit is None), np.bool_) for s in trajectory.segments], dtype=np.bool_
    )
    if credit is not None:
        mask &= _of_turns(turns, dict.fromkeys(credit, 1.0)) > 0
    mask[0] = False
    return mask


def _of_turns(turns: NDArray[np.int32], values: Mapping[int, float]) -> NDArray[np.float32]:
    """The value of each token's turn `[n]`; 0 where it has none."""
    table = np.zeros(max(int(turns.max()), *values, 0) + 2, np.float32)
    table[list(values)] = list(values.values())
    return table[turns]  # the last place is that of turn -1


def trained_tokens(episode: Episode, credit: Mapping[int, float] | None, longest: int | None = None) -> int:
    """How many tokens of the episode are trained; `credit` as for `train_mask`. None in trajectories over `longest`."""
    return sum(
        int(train_mask(episode, i, turn_indices(episode, i), credit).sum())
        for i, t in enumerate(episode.trajectories)
        if not t.abandoned and (longest is None or len(t) <= longest)
    )


def newest_version(episode: Episode) -> int:
    """The newest weights that sampled a token of the episode; 0 where nothing was sampled."""
    return max((int(t.versions.max()) for t in episode.trajectories if not t.abandoned), default=0)


def _trains(source: object, demonstrations: bool) -> bool:
    if demonstrations:
        return isinstance(source, Demonstration)
    return isinstance(source, Sampled) and source.trained and source.temperature > 0


def pack(
    items: Sequence[Item],
    groups: Mapping[int, Group],
    credits: Mapping[int, Credit],
    *,
    version: int,
    demonstrations: bool = False,
    longest: int | None = None,
) -> Batch:
    """One pass as tensors. `groups` and `credits` are by place in the manifest; `version` is the one being trained.

    `longest` is the plan's: trajectories that it left out are in no denominator either. No items give a dummy of two
    untrained tokens, which keeps a rank in step with the others.
    """
    if not items:
        return _dummy()
    columns = []
    for item in items:
        group = groups[item.group]
        trajectory = _trajectory(group, item)
        if len(trajectory) != item.length:
            raise RunError(
                f"group {group.id}, episode {item.episode}: trajectory {item.trajectory} has {len(trajectory)} tokens, "
                f"the manifest said {item.length}: the feed's manifest and its bytes are of different takes"
            )
        columns.append(Columns(group, item, credits[item.group][item.episode], version, demonstrations, longest))

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate([vars(c)[name] for c in columns])).to(dtype)

    lengths = [item.length for item in items]
    total = sum(lengths)
    return Batch(
        tokens=joined("tokens", torch.int64),
        positions=joined("positions", torch.int64),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        mask=joined("mask", torch.bool),
        behaviour=joined("behaviour", torch.float32),
        temperatures=joined("temperatures", torch.float32),
        staleness=joined("staleness", torch.int32),
        queued=joined("queued", torch.int32),
        turns=joined("turns", torch.int32),
        episodes=joined("episodes", torch.int64),
        trajectories=joined("trajectories", torch.int32),
        groups=joined("groups", torch.int64),
        credit=joined("credit", torch.float32),
        episode_tokens=joined("episode_tokens", torch.float32),
        weights=torch.zeros(total),
        advantages=torch.zeros(total),
    )


def _trajectory(group: Group, item: Item) -> Trajectory:
    try:
        return group.episodes[item.episode].trajectories[item.trajectory]
    except IndexError as error:
        raise RunError(f"group {group.id} has no {item}: the feed's manifest and its bytes differ") from error


def _dummy() -> Batch:
    zeros, whole = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    return Batch(
        tokens=whole,
        positions=torch.arange(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        mask=torch.zeros(2, dtype=torch.bool),
        behaviour=zeros,
        temperatures=torch.ones(2),
        staleness=torch.zeros(2, dtype=torch.int32),
        queued=torch.zeros(2, dtype=torch.int32),
        turns=torch.full((2,), -1, dtype=torch.int32),
        episodes=torch.full((2,), -1),
        trajectories=torch.full((2,), -1, dtype=torch.int32),
        groups=torch.full((2,), -1),
        credit=zeros,
        episode_tokens=zeros,
        weights=zeros,
        advantages=zeros,
    )
