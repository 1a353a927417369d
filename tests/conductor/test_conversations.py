"""Conversations as batches: what is refused, and that order and split follow from the seed alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.conductor.conversations import Conversation, Conversations, parse_conversation, split
from agentrl.conductor.feed import RunIsOver
from agentrl.errors import DataError
from agentrl.types import Context, Demonstration, Segment, Trajectory, Version


def talk(text: str) -> Conversation:
    return parse_conversation(
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]}, 0
    )


def render(conversation: Conversation) -> Trajectory:
    said = np.array(list(str(conversation.messages[-1]["content"]).encode()), np.int32)
    return Trajectory((Segment(np.array([1]), None, Context()), Segment(said, None, Demonstration())))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "conversation 7 has no list 'messages'"),
        ({"messages": []}, "conversation 7 has no list 'messages'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"conversation 7: messages\[0\] has role 'robot'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no assistant message"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": "calc"}, "'tools' is a str"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_conversation(row, 7)


def test_the_split_depends_on_the_seed_alone() -> None:
    rows = [talk(str(i)) for i in range(100)]
    train, held = split(rows, 0.1, 3)
    assert (len(train), len(held)) == (90, 10)
    assert split(rows, 0.1, 3) == (train, held)
    assert split(rows, 0.1, 4)[1] != held
    assert split(rows, 0.0, 3) == (rows, [])
    with pytest.raises(DataError, match="leave none to train on"):
        split(rows[:1], 0.5, 3)


async def test_a_steps_batch_follows_from_its_number_and_epochs_cover_all_rows() -> None:
    rows = [talk(str(i)) for i in range(6)]
    source = Conversations(rows, [], render, batch=3, steps=4, eval_every=2, seed=0)

    async def said(step: int, source: Conversations) -> list[str]:
        batch = await source.take(step, Version(1, step - 1), 1.0)
        assert batch is not None
        assert (batch.take, batch.cursor) == (step, {"position": 3 * step})
        assert [g.id for g in batch.groups] == list(range(3 * (step - 1), 3 * step))
        return [bytes(g.episodes[0].trajectories[0].tokens[1:].astype(np.uint8)).decode() for g in batch.groups]

    first, second, third, fourth = [await said(step, source) for step in (1, 2, 3, 4)]
    assert sorted(first + second) == sorted(third + fourth) == list("012345")
    assert first + second != third + fourth, "a new order each epoch"
    assert await said(3, Conversations(rows, [], render, batch=3, steps=4, eval_every=2, seed=0)) == third, (
        "after a resume"
    )
    with pytest.raises(RunIsOver, match="all 4 steps are done"):
        await source.take(5, Version(1, 4), 1.0)


async def test_a_conversation_without_trainable_tokens_is_refused() -> None:
    mute = Trajectory((Segment(np.array([1]), None, Context()),))
    source = Conversations([talk("x")], [], lambda _: mute, batch=1, steps=1, eval_every=1, seed=0)
    with pytest.raises(DataError, match="conversation 0 renders to no trainable token"):
        await source.take(1, Version(1, 0), 1.0)


async def test_held_out_conversations_come_when_they_are_due_and_are_not_learned() -> None:
    rows, held = [talk("a")], [talk("b"), talk("c")]
    source = Conversations(rows, held, render, batch=1, steps=3, eval_every=2, seed=0)
    asked: list[tuple[int, bool, int]] = []
    step = 1
    while True:
        try:
            batch = await source.take(step, Version(1, step - 1), 1.0)
        except RunIsOver:
            break
        assert batch is not None
        asked.append((step, batch.learn, len(batch.groups)))
        step += batch.learn
    assert asked == [(1, False, 2), (1, True, 1), (2, True, 1), (3, False, 2), (3, True, 1), (4, False, 2)]
