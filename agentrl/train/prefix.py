"""Tokens with one history are computed once: a group's prompt, the turns before its branches part, a system prompt.

A causal model's hidden state at a token depends on that token and the ones before it alone, so that sequences which
begin alike have the same states there, and one sum of gradients. What nothing is read from is not computed at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


class Shared(NamedTuple):
    """What of a pack of T tokens a model computes."""

    computed: Int64Array
    """`[U]`, numbers of the pack's tokens, ascending."""
    place: Int64Array
    """`[T]`, where among these a token's state is found; -1 where it is not computed."""
    lengths: tuple[int, ...]
    """Of each sequence that something is read from: its tokens up to the last one read."""
    sequences: Int64Array
    """`[sum(lengths)]`, these sequences one after the other, as places among the computed."""


def share(tokens: Int64Array, lengths: Sequence[int], read: Int64Array) -> Shared:
    """The least that gives the states of the tokens `read` `[N]`; tokens `[T]` are sequences of these lengths."""
    starts = np.cumsum([0, *lengths])
    needed = np.zeros(len(lengths), np.int64)
    homes = np.searchsorted(starts, read, "right") - 1
    np.maximum.at(needed, homes, read - starts[homes] + 1)
    spans = [(int(start), int(start + n)) for start, n in zip(starts[:-1], needed, strict=True) if n]
    # In the order of their bytes a sequence has most in common with its neighbours.
    ordered = sorted(spans, key=lambda span: tokens[slice(*span)].tobytes())
    source = np.full(len(tokens), -1)
    for start, end in spans:
        source[start:end] = np.arange(start, end)
    for (before, before_end), (start, end) in itertools.pairwise(ordered):
        n = min(before_end - before, end - start)
        differs = tokens[before : before + n] != tokens[start : start + n]
        common = int(differs.argmax()) if differs.any() else n
        source[start : start + common] = source[before : before + common]
    own = source == np.arange(len(tokens))
    place = np.where(source < 0, -1, (np.cumsum(own) - 1)[source])
    sequences = np.concatenate([place[slice(*span)] for span in spans])
    return Shared(np.flatnonzero(own), place, tuple(end - start for start, end in spans), sequences)
