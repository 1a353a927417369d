"""A tiny model learns an environment in one process: the embedded engine, the real endpoint, loop and algorithm.

First it imitates conversations (a start that earns something), then it learns from its own episodes, on policy.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from aiohttp.test_utils import TestServer

from agentrl.agent import Agent
from agentrl.conductor.conversations import Conversation, demonstration, renderer_of
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.render import Renderer
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded.__main__ import build
from agentrl.env import Env
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.player import Player, Sampling
from agentrl.rollout.session import MakeAgent, SessionSpec
from agentrl.testing.tiny import make_tiny_model
from agentrl.train import experience
from agentrl.train.algorithm import Algorithm, load
from agentrl.train.batch import pack
from agentrl.train.options import AlgorithmOptions
from agentrl.train.plan import make_plan
from agentrl.types import Group, Message, Row, Version
from tests.train.drawing import describe
from tests.train.plain import PlainBackend

START = Version(1, 0)


class Classroom:
    """One model, one environment. `learn` returns the mean reward of each step."""

    def __init__(
        self,
        folder: Path,
        make_env: Callable[[Row], Env],
        *,
        fixed: Sequence[str],
        make_agent: MakeAgent = Agent,
        max_turns: int = 8,
        max_tokens: int = 64,
        **algorithm: Any,
    ) -> None:
        torch.set_num_threads(1)  # tensors this small are only held up by a second thread
        torch.manual_seed(0)
        self.folder = make_tiny_model(folder / "model", fixed=fixed, max_length=512)
        self.template = ChatTemplate.load(self.folder)
        self.algorithm = load(AlgorithmOptions(**algorithm))
        self.backend = PlainBackend(self.folder, self.algorithm, betas=(0.9, 0.99))
        self._make_env, self._make_agent = make_env, make_agent
        self._options = RolloutOptions(max_turns=max_turns, max_tokens=max_tokens, retries=0)

    def imitate(
        self, conversations: Iterable[Sequence[Message]], *, steps: int, batch: int = 48, lr: float = 3e-3
    ) -> None:
        """Supervised fine-tuning on conversations, the same for all agents."""
        sft = load(AlgorithmOptions(name="sft"))
        render = renderer_of(Renderer(self.template))
        source = iter(conversations)
        for step in range(steps):
            shown = [Conversation(tuple(next(source))) for _ in range(batch)]
            groups = [demonstration(one, render, place, 0) for place, one in enumerate(shown)]
            self._step(sft, groups, step, lr * min(1.0, 2 * (1 - step / steps)))

    def learn(
        self, rows: Sequence[Row], *, steps: int, enough: float, groups: int = 8, samples: int = 12, lr: float = 1.5e-3
    ) -> list[float]:
        """Reinforcement learning until the mean of the last three steps is `enough`."""
        return asyncio.run(self._learn(rows, steps, enough, groups, samples, lr))

    async def _learn(
        self, rows: Sequence[Row], steps: int, enough: float, groups: int, samples: int, lr: float
    ) -> list[float]:
        rewards: list[float] = []
        self._save()
        async with self._engine() as engine:
            endpoint = Endpoint(engine, self.template)
            player = Player(
                self._options,
                make_env=self._make_env,
                make_agent=self._make_agent,
                open_session=lambda spec: _opened(endpoint, spec),
            )
            for step in range(steps):
                chosen = [rows[(step * groups + i) % len(rows)] for i in range(groups)]
                played = await asyncio.gather(*(_group(player, step, i, row, samples) for i, row in enumerate(chosen)))
                rewards.append(fmean(e.reward or 0.0 for group in played for e in group.episodes))
                if fmean(rewards[-3:]) >= enough and len(rewards) >= 3:
                    break
                self._step(self.algorithm, list(played), step, lr)
                self._save()
                await engine.update_from_disk(self.folder, Version(1, step + 1))
            await endpoint.stop()
        return rewards

    def _step(self, algorithm: Algorithm, groups: list[Group], step: int, lr: float) -> None:
        taken = describe(groups, step)
        plan = make_plan(taken, ranks=1, minibatches=1, budget=1 << 14, longest=None)
        credits = {i: algorithm.credit(entry) for i, entry in enumerate(taken.groups)}
        batches = [
            [
                pack(items, dict(enumerate(groups)), credits, version=step, demonstrations=algorithm.demonstrations)
                for items in minibatch[0]
            ]
            for minibatch in plan.passes
        ]
        ready = experience.estimate(
            self.backend, algorithm, experience.predict(self.backend, algorithm, batches), len(groups)
        )
        for part in ready:
            self.backend.step(part, algorithm.loss, lr=lr)

    def _save(self) -> None:
        model: Any = self.backend.policy.model
        model.save_pretrained(self.folder)

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[EngineClient]:
        app = build(self.folder, version=START, dtype=torch.float32, max_running=128)
        thread = threading.Thread(target=app.scheduler.run, daemon=True)
        thread.start()
        server = TestServer(app.routes())  # on a port that the system gives it
        await server.start_server(access_log=None)
        client = EngineClient(f"http://{server.host}:{server.port}")
        try:
            yield client
        finally:
            await client.close()
            app.scheduler.stop()
            await asyncio.to_thread(thread.join, 60.0)
            await server.close()


async def _group(player: Player, step: int, place: int, row: Row, samples: int) -> Group:
    async def one(sample: int) -> Any:
        spec = EpisodeSpec(place, sample, 0, 1, row)
        outcome = await player.play(spec, Sampling(f"s{step}", 1000 * step + 100 * place + sample, True, 1.0))
        return outcome.episode

    episodes = await asyncio.gather(*map(one, range(samples)))
    return Group(place, 0, 0, "env", tuple(episodes))


def _opened(endpoint: Endpoint, spec: SessionSpec) -> Any:
    return endpoint.open(
        spec.id,
        seed=spec.seed,
        training=spec.training,
        temperature=spec.temperature,
        max_tokens=spec.max_tokens,
        deadline=spec.deadline,
    )
