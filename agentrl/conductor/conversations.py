"""Conversations as batches: the source of supervised fine-tuning behind the same feed as the pool.

The batch of a step is a function of the seed and the step alone, so a resume needs nothing but the step's number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.conductor.feed import Batch, RunIsOver
from agentrl.endpoint.messages import canonical
from agentrl.endpoint.render import CannotContinue, Renderer
from agentrl.errors import ContractError, DataError
from agentrl.rollout.schedule import Schedule, stable_seed
from agentrl.types import Episode, Group, Message, Row, Stop, Trajectory, Turn, Version


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is imitated: the assistant's messages; `tools` are the schemas that the template shows."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


Render = Callable[[Conversation], Trajectory]
"""Through the model's chat template: context segments, and demonstrations where the assistant speaks."""


def renderer_of(renderer: Renderer) -> Render:
    """Rendering by the endpoint's own renderer, so that token boundaries are those of rollouts."""

    def render(conversation: Conversation) -> Trajectory:
        try:
            return renderer.demonstrate(conversation.messages, renderer.setting(conversation.tools))
        except (ContractError, CannotContinue) as error:
            raise DataError(f"this conversation cannot be rendered: {error}: {conversation.messages!r:.300}") from error

    return render


def parse_conversation(row: Row, number: int) -> Conversation:
    """Check one row; DataError says which one and what is missing."""
    messages, tools = row.get("messages"), row.get("tools") or ()
    if not isinstance(messages, list) or not messages:
        raise DataError(f"conversation {number} has no list 'messages': {{'messages': [{{'role', 'content'}}, …]}}")
    try:
        clean = tuple(canonical(message, index) for index, message in enumerate(messages))
    except ContractError as error:
        raise DataError(f"conversation {number}: {error}") from error
    if not any(message["role"] == "assistant" for message in clean):
        raise DataError(f"conversation {number} has no assistant message: there is nothing to imitate")
    if not isinstance(tools, list | tuple):
        raise DataError(f"conversation {number}: 'tools' is a {type(tools).__name__}, not a list of schemas")
    return Conversation(clean, tuple(tools))


def split(rows: Sequence[Conversation], share: float, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out): the same split for the same seed and rows."""
    held = round(share * len(rows))
    if share > 0:
        held = max(held, 1)
    if held >= len(rows):
        raise DataError(f"{len(rows)} conversations with a held-out share of {share} leave none to train on")
    by_lot = sorted(range(len(rows)), key=lambda index: stable_seed("held out", seed, index))
    out = set(by_lot[:held])
    return [r for i, r in enumerate(rows) if i not in out], [r for i, r in enumerate(rows) if i in out]


class Conversations:
    """The source of `agentrl sft`: `batch` conversations a step, in a new order each epoch.

    Every `eval_every` steps, before the first and after the last, the held-out ones come first.
    """

    def __init__(
        self,
        rows: Sequence[Conversation],
        held_out: Sequence[Conversation],
        render: Render,
        *,
        batch: int,
        steps: int,
        eval_every: int,
        seed: int,
    ) -> None:
        self._rows = rows
        self._held_out = held_out
        self._render = render
        self._batch = batch
        self._steps = steps
        self._eval_every = eval_every
        self._schedule = Schedule(len(rows), seed, epochs=None, shuffle=True)
        self._evaluated: int | None = None

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        """The conversations of `step`; take ids are step numbers."""
        first = (step - 1) * self._batch
        due = bool(self._held_out) and ((step - 1) % self._eval_every == 0 or step > self._steps)
        if due and self._evaluated != step:
            self._evaluated = step
            groups = await asyncio.to_thread(lambda: [self._held(i) for i in range(len(self._held_out))])
            return Batch(step - 1, groups, {"position": first}, learn=False)
        if step > self._steps:
            raise RunIsOver(f"all {self._steps} steps are done")
        groups = await asyncio.to_thread(lambda: [self._group(first + i) for i in range(self._batch)])
        return Batch(step, groups, {"position": first + self._batch})

    def _held(self, index: int) -> Group:
        return demonstration(self._held_out[index], self._render, index, 0)

    def _group(self, position: int) -> Group:
        epoch, row = self._schedule.place(position)
        return demonstration(self._rows[row], self._render, position, epoch)


def demonstration(conversation: Conversation, render: Render, position: int, epoch: int) -> Group:
    """A group of one episode that holds the rendered conversation."""
    trajectory = render(conversation)
    if not bool(trajectory.loss_mask.any()):
        raise DataError(f"conversation {position} renders to no trainable token: {conversation.messages[-1]!r}")
    episode = Episode(
        group=position,
        sample=0,
        attempt=0,
        seed=0,
        row={},
        messages=(),
        turns=(Turn(0, 0, len(trajectory), 0.0),),
        trajectories=(trajectory,),
        stop=Stop.FINISHED,
    )
    return Group(position, 0, epoch, "sft", (episode,))
