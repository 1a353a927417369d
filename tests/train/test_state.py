"""Which step's checkpoint is due, also where steps were skipped."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.train.state import State


@pytest.mark.parametrize("id", ["R05", "R06", "R07", "R08", "R09"])
def test_what_is_saved(zero3_resume: dict[str, dict[str, Any]], id: str) -> None:
    given, expected = zero3_resume[id]["input"], zero3_resume[id]["expected"]
    first = given.get("resumed_at", 0)
    state = State(step=first, saved=first)
    saved = []
    for step, (applied, skipped) in enumerate(given["steps"], first + 1):
        state.trained(step, 10 + step, {"row": step}, applied=applied, skipped=skipped)
        if applied and not skipped and state.due(given["every"]):
            assert state.unsaved() is state
            saved.append(step)
            state.saved = step
    assert saved == expected["saved"]
    last = state.unsaved()
    if expected["at_the_end"] is None:
        assert last is None
    else:
        assert last is not None
        at = expected["at_the_end"]
        assert (last.step, last.take, last.cursor["row"]) == (at, 10 + at, at)
    assert (state.step, state.skipped) == (first + len(given["steps"]), sum(s for _, s in given["steps"]))
