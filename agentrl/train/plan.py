"""Which rank trains which trajectories in which pass: computed alike by every rank from the manifest alone.

All ranks do equal numbers of passes, or ZeRO-3's collectives would wait for ever; where there is nothing left to do a
pass is empty (`()`), and its batch a dummy inside the loss graph.

Sequences of a group lie in one pass where that costs little (`_together`), since they share a prompt, which a pass
computes once. How much they share is not known here: budgets are of all tokens.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.train.manifest import GroupEntry, Manifest


class Item(NamedTuple):
    """One trajectory to train on: places in the manifest, and its length in tokens."""

    group: int
    episode: int
    trajectory: int
    length: int


Pass = tuple[Item, ...]
"""What one rank packs into one forward pass."""
_UNEVEN = 1 / 16


@dataclass(frozen=True, slots=True)
class Plan:
    """`passes[minibatch][rank]` are the passes of a rank, equal in number over ranks. `overlong` were left out."""

    passes: tuple[tuple[tuple[Pass, ...], ...], ...]
    overlong: int
    budget: int

    @property
    def fill(self) -> float:
        """Real tokens over the token budget of all passes, empty ones counted; a longer pass counts its own length."""
        sizes = [sum(s.length for s in p) for minibatch in self.passes for rank in minibatch for p in rank]
        return sum(sizes) / max(sum(max(size, self.budget) for size in sizes), 1)


def make_plan(manifest: Manifest, *, ranks: int, minibatches: int, budget: int, longest: int | None) -> Plan:
    """Cut the groups into minibatches, and each minibatch's trajectories into passes of at most `budget` tokens."""
    overlong = 0
    passes = []
    for part in _split(manifest.groups, minibatches):
        sequences = []
        for place, group in part:
            found = _trainable(place, group)
            kept = [s for s in found if longest is None or s.length <= longest]
            overlong += len(found) - len(kept)
            sequences += kept
        bins = _pack(sequences, budget)
        level = _level(bins, -(-len(bins) // ranks) * ranks, budget)
        passes.append(_share(_together(level, budget), ranks))
    return Plan(tuple(passes), overlong, budget)


def _split(groups: Sequence[GroupEntry], parts: int) -> list[list[tuple[int, GroupEntry]]]:
    """Contiguous parts whose numbers of groups differ by at most one."""
    numbered = list(enumerate(groups))
    cuts = [len(numbered) * i // parts for i in range(parts + 1)]
    return [numbered[a:b] for a, b in itertools.pairwise(cuts)]


def _trainable(place: int, group: GroupEntry) -> list[Item]:
    return [
        Item(place, e, t, trajectory.length)
        for e, episode in enumerate(group.episodes)
        if episode.scored
        for t, trajectory in enumerate(episode.trajectories)
        if trajectory.sampled > 0 and not trajectory.abandoned and trajectory.length > 1
    ]


def _pack(sequences: Sequence[Item], budget: int) -> list[Pass]:
    """Best fit decreasing: each sequence, longest first, into the fullest pass that still holds it."""
    bins: list[list[Item]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for sequence in sorted(sequences, key=lambda s: (-s.length, s)):
        at = bisect.bisect_left(room, (sequence.length, -1))
        if at < len(room):
            left, index = room.pop(at)
            bins[index].append(sequence)
        else:
            left, index = max(budget, sequence.length), len(bins)
            bins.append([sequence])
        bisect.insort(room, (left - sequence.length, index))
    return [tuple(b) for b in bins]


def _level(bins: Sequence[Pass], count: int, budget: int) -> Sequence[Pass]:
    """The same sequences in `count` passes of even size, where that fits: ranks then wait less for each other."""
    spread: list[list[Item]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for item in sorted((i for b in bins for i in b), key=lambda i: (-i.length, i)):
        load, index = heapq.heappop(loads)
        if load and load + item.length > budget:
            return bins
        spread[index].append(item)
        heapq.heappush(loads, (load + item.length, index))
    return [tuple(s) for s in spread]


def _together(bins: Sequence[Pass], budget: int) -> Sequence[Pass]:
    """The same sequences in as many passes, with a group's next to each other: a pass computes what they share once.

    Only where the heaviest pass becomes heavier by at most `_UNEVEN` and fits the budget as before.
    """
    items = sorted(i for b in bins for i in b)
    heaviest = max((sum(s.length for s in b) for b in bins), default=0)
    limit = min(heaviest * (1 + _UNEVEN), budget)
    found: list[list[Item]] = [[]]
    load, left = 0, sum(i.length for i in items)
    for item in items:
        passes = len(bins) - len(found)
        # A pass ends where it is as heavy as those that are left would be on average.
        if passes and load and (load + item.length > limit or load + item.length / 2 > (load + left) / (passes + 1)):
            found.append([])
            load = 0
        found[-1].append(item)
        load, left = load + item.length, left - item.length
        if load > limit and len(found[-1]) > 1:
            return bins
    return [*map(tuple, found), *[()] * (len(bins) - len(found))]


def _share(bins: Sequence[Pass], ranks: int) -> tuple[tuple[Pass, ...], ...]:
    """Equal numbers of passes a rank, the heaviest first and dealt so that passes done at once are alike in size."""
    ordered = sorted(bins, key=lambda b: (-sum(s.length for s in b), b))
    rounds = max(1, -(-len(ordered) // ranks))
    shares: list[list[Pass]] = [[] for _ in range(ranks)]
    for index in range(rounds * ranks):
        turn, place = divmod(index, ranks)
        rank = place if turn % 2 == 0 else ranks - 1 - place
        shares[rank].append(ordered[index] if index < len(ordered) else ())
    return tuple(tuple(share) for share in shares)
