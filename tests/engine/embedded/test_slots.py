"""Whatever comes and goes, a row's cache holds the tokens that it is said to hold, and holes are soon closed."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.embedded.model import KVCache
from agentrl.engine.embedded.sampler import Rule
from agentrl.engine.embedded.sequence import Live
from agentrl.engine.embedded.shape import ModelShape
from agentrl.engine.embedded.slots import Slots

SHAPE = ModelShape(
    vocab=9,
    hidden=2,
    layers=1,
    heads=1,
    kv_heads=1,
    head=1,
    eps=1e-6,
    tied=True,
    context=64,
    intermediate=2,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos=frozenset(),
)
RUNNING = 3


class Worked:
    """Slots, with a cache in which a token's key and value are the token itself."""

    def __init__(self) -> None:
        self.slots = Slots(KVCache(SHAPE, 2 * RUNNING, torch.float32), 2 * RUNNING, RUNNING, SHAPE.context)
        self.moved = 0

    def write(self, row: int, start: int, tokens: list[int]) -> None:
        for cache in (self.slots.cache.k, self.slots.cache.v):
            cache[0, row, 0, start : start + len(tokens), 0] = torch.tensor(tokens, dtype=torch.float32)

    def newest(self, row: int, token: int) -> None:
        """As the scheduler does once a token was sampled."""
        slots = self.slots
        slots.live(row).tokens.append(token)
        slots.held[row] = slots.lengths[row]
        slots.last[row] = slots.ids[row, slots.lengths[row]] = token
        slots.lengths[row] += 1

    def admit(self, prompt: list[int]) -> Live:
        live = Live("r", np.array(prompt, np.int32), 60, Rule(), frozenset(), (), lambda _reply, _last: None)
        row, shared = self.slots.admit(live)
        assert self.slots.live(row) is live
        assert shared < len(prompt)
        self.write(row, shared, prompt[shared:])
        self.newest(row, 8)
        return live

    def step(self, token: int) -> None:
        slots = self.slots
        rows = slots.step()
        assert [slots.live(row) for row in rows] == slots.active
        for row in rows:
            self.write(row, int(slots.lengths[row]) - 1, [int(slots.last[row])])
            self.newest(row, token)

    def check(self) -> None:
        slots = self.slots
        running = [row for row in range(slots.span) if row not in slots.holes]
        assert [slots.live(row) for row in running] == slots.active
        assert slots.count == len(slots.active) <= slots.span <= RUNNING
        for row in range(2 * RUNNING):
            held = int(slots.held[row])
            for cache in (slots.cache.k, slots.cache.v):
                assert cache[0, row, 0, :held, 0].tolist() == slots.ids[row, :held].tolist()
        for row, live in zip(running, slots.active, strict=True):
            assert slots.ids[row, : slots.lengths[row]].tolist() == live.ids.tolist()
            assert slots.held[row] == slots.lengths[row] - 1


def test_a_turn_that_comes_back_soon_moves_nothing_and_a_hole_is_closed_in_time() -> None:
    worked = Worked()
    slots = worked.slots
    first, _second, third = (worked.admit([n, n, n]) for n in range(3))
    slots.release(first)
    assert slots.holes == {0}
    worked.step(5)
    assert slots.span == 3
    again = worked.admit([*first.ids.tolist(), 1])
    assert slots.live(0) is again
    assert again.cached == 3
    assert slots.holes == set()
    slots.release(again)
    for _ in range(4):
        worked.step(5)
    assert slots.holes == {0}
    worked.step(5)
    assert slots.span == slots.count == 2
    assert slots.live(0) is third
    worked.check()
    # Moved, and found again.
    assert worked.admit([*again.ids.tolist(), 1]).cached == 5


@given(st.data())
def test_rows_hold_what_they_are_said_to(data: st.DataObject) -> None:
    worked, ended = Worked(), [[0]]
    for _ in range(data.draw(st.integers(1, 25))):
        slots = worked.slots
        choice = data.draw(st.sampled_from(["admit", "go on", "step", "release", "retract", "drop"]))
        token = data.draw(st.integers(0, 2))
        if choice in ("admit", "go on") and not slots.full:
            before = data.draw(st.sampled_from(ended)) if choice == "go on" else []
            prompt = [*before, *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))]
            if len(prompt) < 50:
                worked.admit(prompt)
        elif choice == "step" and slots.count and int(slots.lengths.max()) < 60:
            worked.step(token)
        elif choice == "release" and slots.count:
            live = data.draw(st.sampled_from(slots.active))
            slots.release(live)
            ended.append(live.ids.tolist())
        elif choice == "retract":
            slots.retract()
        elif choice == "drop":
            slots.drop_kept()
            held = int(slots.held.sum())
            assert held == sum(int(slots.held[row]) for row in range(slots.span) if row not in slots.holes)
        worked.check()
