"""What was handed out stays as it is, whoever writes on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.endpoint.tape import strip


@given(st.lists(st.tuples(st.integers(0, 100), st.lists(st.integers(0, 9), max_size=300)), max_size=12))
def test_strips_are_what_was_appended(steps: list[tuple[int, list[int]]]) -> None:
    strips = [strip(np.array([1, 2], np.int32))]
    expected = [[1, 2]]
    for at, new in steps:
        at %= len(strips)
        strips.append(strips[at].then(np.array(new, np.int32)))
        expected.append(expected[at] + new)
    assert [x.tokens.tolist() for x in strips] == expected


def test_a_growing_conversation_is_not_copied() -> None:
    first = strip(np.zeros(4, np.int32))
    second = first.then(np.ones(2, np.int32))
    assert np.shares_memory(first.tokens, second.tokens)
    rival = first.then(np.full(2, 7, np.int32))
    assert not np.shares_memory(first.tokens, rival.tokens)
    assert second.tokens.tolist() == [0, 0, 0, 0, 1, 1]
    assert not second.tokens.flags.writeable
