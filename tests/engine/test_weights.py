"""Whether a folder's weights fit the model that is served, and what the output head of tied weights may do."""

from __future__ import annotations

import pytest

from agentrl.engine.weights import check_shapes
from agentrl.errors import ConfigError

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
TIED = {EMBED: (64, 8), NORM: (8,)}
UNTIED = {**TIED, HEAD: (64, 8)}


@pytest.mark.parametrize(
    ("new", "expected", "tied"),
    [(TIED, TIED, True), (UNTIED, TIED, True), (TIED, UNTIED, True), (UNTIED, UNTIED, False)],
)
def test_a_tied_head_may_come_or_not(
    new: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], tied: bool
) -> None:
    check_shapes(new, expected, tied=tied)


@pytest.mark.parametrize(
    ("new", "expected", "tied", "named"),
    [
        (TIED, UNTIED, False, HEAD),
        (UNTIED, TIED, False, HEAD),
        ({EMBED: (64, 8)}, TIED, True, NORM),
        ({**TIED, NORM: (9,)}, TIED, True, NORM),
        ({**TIED, EMBED: (8, 64)}, TIED, True, EMBED),
    ],
)
def test_what_does_not_fit_is_named(
    new: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], tied: bool, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check_shapes(new, expected, tied=tied)
