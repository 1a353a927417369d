"""The instances of a group share nothing: each has a row and, where its methods are plain, a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from agentrl.agent import Agent
from agentrl.env import Env
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.player import Player, Sampling
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.session import byte_sessions
from agentrl.types import Message, Row, Step


async def test_instances_of_a_group_have_rows_of_their_own_and_one_thread_each() -> None:
    threads: dict[int, set[int]] = {}

    class Plain(Env):
        def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
            threads[id(self)] = {threading.get_ident()}
            self.row["seen"].append(seed)
            return [{"role": "user", "content": str(self.row["seen"])}], {}

        def step(self, action: Message) -> Any:
            threads[id(self)].add(threading.get_ident())
            return Step([], float(len(self.row["seen"])), True, False, {})

    row: Row = {"seen": []}
    kept: list[Env] = []

    def make(row: Row) -> Env:
        kept.append(Plain(row))
        return kept[-1]

    engine = ScriptedEngine(lambda prompt: [65])
    player = Player(RolloutOptions(), make_env=make, make_agent=Agent, open_session=byte_sessions(engine))
    specs = [EpisodeSpec(0, sample, 0, 7, row) for sample in range(4)]
    played = await asyncio.gather(*(player.play(spec, Sampling("t", 1, True, 1.0)) for spec in specs))
    assert [outcome.episode.reward for outcome in played] == [1.0] * 4
    assert {outcome.episode.messages[0]["content"] for outcome in played} == {"[7]"}
    assert row == {"seen": []}
    assert [len(used) for used in threads.values()] == [1] * 4
