"""An engine set aside for evaluations: `eval.engine = "own"`.

It never serves rollouts and is in no publish. Before an evaluation it loads the weights of exactly the step that is
judged, and holds them until the next one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.conductor.config import RunConfig
from agentrl.conductor.desk import Desk
from agentrl.conductor.engines import Fleet
from agentrl.conductor.feed import WeightsReady
from agentrl.conductor.sessions import sessions_of
from agentrl.conductor.watchdog import Wait
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.errors import EngineError, RunError
from agentrl.rollout.session import OpenSession
from agentrl.types import Version

ATTEMPTS = 3


class Aside:
    """`start` it with the run's first weights, `keep` the weights of each step, `pin` before judging one.

    `newest` is what the other engines hold: the weights of a step that nobody knew to be the last.
    """

    def __init__(
        self, config: RunConfig, desk: Desk, weights: Path, newest: Callable[[], tuple[Path, Version] | None]
    ) -> None:
        options = config.engine.model_copy(update={"count": 1, "port": None, "gpus": config.eval.gpus})
        self._config = config
        self._newest = newest
        self._fleet = Fleet(
            options,
            config.model,
            desk,
            restarts=config.monitor.engine_restarts,
            silent_seconds=config.monitor.silent_seconds,
            name="eval-engine",
        )
        self._folder = weights / "evaluation"
        self._kept: dict[int, tuple[Path, Version]] = {}
        self._endpoint: Endpoint | None = None

    async def start(self, model: Path, version: Version) -> OpenSession:
        """Start engine and endpoint on the weights in `model`; sessions that it answers."""
        router = await self._fleet.start(model, version)
        # The configured address is that of the rollouts' endpoint.
        options = self._config.endpoint.model_copy(update={"port": 0})
        self._endpoint = Endpoint(router, ChatTemplate.load(self._config.model), options)
        await self._endpoint.start()
        return sessions_of(self._endpoint)

    async def run(self) -> None:
        """Keep it alive until cancelled."""
        await self._fleet.run()

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        return self._fleet.waits()

    def keep(self, ready: WeightsReady) -> None:
        """Where these weights are to be judged, they outlive the other engines' need of them."""
        if ready.step % self._config.eval.every and ready.step < self._config.train.steps:
            return
        folder = self._folder / ready.version
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        shutil.copytree(ready.path, folder, copy_function=os.link)  # links: nothing is copied
        self._forget(ready.step)
        self._kept[ready.step] = (folder, Version.parse(ready.version))

    async def pin(self, step: int) -> None:
        """Load the weights of `step`; RunError where the engine refuses them."""
        router = self._fleet.router
        wanted = self._kept.pop(step, None) or self._newest() or router.current
        for passed in [kept for kept in self._kept if kept < step]:
            self._forget(passed)
        if wanted is None or wanted == router.current:
            return
        before = router.current
        for attempt in range(1, ATTEMPTS + 1):
            await self._fleet.serving()
            try:
                await router.publish(*wanted)
                break
            except EngineError as error:
                if attempt == ATTEMPTS:
                    raise RunError(
                        f"the engine set aside for evaluations refused the weights {wanted[1]} of step {step} "
                        f"{ATTEMPTS} times, last: {error}; see logs/eval-engine-0.log"
                    ) from error
                await asyncio.sleep(1.0)
        if before is not None and before[0].is_relative_to(self._folder):
            shutil.rmtree(before[0], ignore_errors=True)

    def _forget(self, step: int) -> None:
        if (kept := self._kept.pop(step, None)) is not None:
            shutil.rmtree(kept[0], ignore_errors=True)

    async def stop(self) -> None:
        """End it."""
        if self._endpoint is not None:
            await self._endpoint.stop()
        await self._fleet.stop()
