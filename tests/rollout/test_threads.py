"""Environments of plain functions: each has a thread, none holds the others up, one that hangs is left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from agentrl.testing.scripted import ScriptedEngine
from agentrl.types import Message, Step, Stop
from tests.rollout.test_episode import Plain, play


async def test_plain_functions_run_in_threads_and_do_not_block() -> None:
    together = threading.Barrier(20)  # none gets past it while one holds the loop, or another one's thread

    class Blocking(Plain):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            together.wait(60.0)
            return [{"role": "user", "content": "go"}], {}

        def step(self, action: Message) -> Any:
            together.wait(60.0)
            return Step([], 1.0, True, False, {})

    engine = ScriptedEngine(lambda prompt: [65])
    outcomes = await asyncio.gather(*(play(Blocking({}), engine=engine) for _ in range(20)))
    assert [outcome.episode.reward for outcome in outcomes] == [1.0] * 20


class PutForward(asyncio.SelectorEventLoop):
    """Real time, that a test can put forward."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    def skip(self, seconds: float) -> None:
        self.ahead += seconds


def test_a_plain_function_that_hangs_costs_its_thread_and_no_more() -> None:
    release = threading.Event()

    class Hangs(Plain):
        def step(self, action: Message) -> Any:
            loop.call_soon_threadsafe(loop.skip, 1e4)  # its time is up as soon as it hangs, and not before
            release.wait(60.0)
            return Step([], 1.0, True, False, {})

    with asyncio.Runner(loop_factory=PutForward) as runner:
        loop = cast(PutForward, runner.get_loop())
        hung = runner.run(play(Hangs({}), engine=ScriptedEngine(lambda prompt: [65]), seconds=1e3))
        assert not release.is_set()
    release.set()
    assert hung.episode.stop is Stop.TIME_LIMIT
    assert hung.episode.reward is None
