"""Each history is computed once, and nothing that is not read."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.prefix import share

PACKS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


@given(PACKS, st.data())
def test_each_history_once(pack: list[list[int]], data: st.DataObject) -> None:
    tokens, lengths = np.array(list(itertools.chain(*pack))), [len(s) for s in pack]
    histories = [tuple(s[: i + 1]) for s in pack for i in range(len(s))]
    read = np.array(data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, unique=True)))
    found = share(tokens, lengths, read)
    needed = {histories[r][: n + 1] for r in read for n in range(len(histories[r]))}
    assert sorted(histories[c] for c in found.computed) == sorted(needed)
    assert (np.diff(found.computed) > 0).all()
    for token, place in enumerate(found.place):
        assert place == -1 or histories[found.computed[place]] == histories[token]
    assert (found.place[read] >= 0).all()
    ends = np.cumsum(found.lengths)
    for end, n in zip(ends, found.lengths, strict=True):
        sequence = found.computed[found.sequences[end - n : end]]
        assert [histories[c] for c in sequence] == [histories[sequence[-1]][: i + 1] for i in range(n)]


def test_the_prompt_of_a_group_is_computed_once() -> None:
    prompt, answers = list(range(36)), [[100 + i] * 32 for i in range(8)]
    pack = [prompt + answer for answer in answers]
    starts = np.arange(8) * 68
    read = np.concatenate([np.arange(start + 35, start + 67) for start in starts])
    found = share(np.array(list(itertools.chain(*pack))), [68] * 8, read)
    assert len(found.computed) == 36 + 8 * 31
    assert found.lengths == (67,) * 8
