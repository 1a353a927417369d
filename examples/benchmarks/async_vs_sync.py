"""Asynchronous (η=4) against synchronous (η=0) training: same model, rows, batch, tokens and concurrency, in one run.

    python examples/benchmarks/async_vs_sync.py [--steps 12]

The learning rate is 0, so every run samples from the same distribution and no run drifts to longer answers. Beside the
two modes it measures what each side needs alone: generation without a trainer, training on recorded groups without
rollouts. Seconds count from the end of a run's second step to its last, start-up and first compilation left out. The
last line is JSON:

    ratio                     sync seconds / async seconds
    overlap_efficiency        the longer of generation-only and training-only seconds / async seconds
    ratio_with_tool_latency   `ratio` with an environment that waits 200 ms a turn
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.agent import Agent
from agentrl.conductor.config import RunConfig
from agentrl.conductor.feed import Batch, CheckpointReady, FeedServer, Phase, RunIsOver, StepMetrics, WeightsReady
from agentrl.conductor.main import run_train
from agentrl.conductor.trainer import TrainerGroup
from agentrl.config import load
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.router import Router
from agentrl.engine.server import start_engine
from agentrl.env import Env
from agentrl.monitor.metrics import read_metrics
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.player import Player, Sampling
from agentrl.rollout.session import Session, SessionSpec
from agentrl.testing.tiny import make_tiny_model
from agentrl.train.options import TrainerJob
from agentrl.types import Episode, Group, Info, Message, Row, Step, Version

FIRST = 2
"""Steps before the clock starts."""
TURNS, WORDS = 6, 20
CONFIG = f"""
name = "NAME"
model = "MODEL"
run_dir = "DIR"
[env]
path = "{Path(__file__).resolve()}:Talk"
[rollout]
groups_per_step = 8
samples = 16
staleness = 4
concurrency = 256
max_turns = {TURNS}
max_tokens = {TURNS * WORDS}
filter_equal = false
[engine]
max_running = 192
[train]
lr = 0.0
checkpoint_every = 0
[eval]
every = 0
"""


class Talk(Env):
    """Six turns of up to twenty tokens; the reward is a fair coin, the same for the same answer."""

    def __init__(self, row: Row, *, wait: float = 0.0) -> None:
        super().__init__(row)
        self.wait = wait
        self.turn = 0

    @classmethod
    def rows(cls, split: str, seed: int) -> list[Row]:
        """Nothing depends on them."""
        return [{"topic": f"{split} {i}"} for i in range(4096)]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The topic."""
        return [{"role": "user", "content": f"Talk about {self.row['topic']}."}], {}

    async def step(self, action: Message) -> Step:
        """Listen, after the tool's latency."""
        await asyncio.sleep(self.wait)
        self.turn += 1
        reward = float(sum(map(ord, action.get("content") or "")) % 2)
        return Step([{"role": "user", "content": "Go on."}], reward, self.turn == TURNS, False, {})


class Talker(Agent):
    """Twenty tokens a turn."""

    async def act(self, observation: list[Message], client: Any) -> Message:
        """Answer."""
        self.messages += observation
        reply = await client.chat.completions.create(model="policy", messages=self.messages, max_tokens=WORDS)
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return self.messages[-1]


def trained(config: Path, name: str, overrides: Sequence[str]) -> dict[str, float]:
    """A whole run; its seconds and tokens after the first steps."""
    code = run_train(config, [f'name="{name}"', *overrides], resume=False)
    if code:
        raise SystemExit(code)
    folder = load(RunConfig, config, [f'name="{name}"']).run_dir / name
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]
    counted = steps[FIRST:]
    return {
        "seconds": counted[-1]["time"] - steps[FIRST - 1]["time"],
        "trained_tokens": sum(line["tokens/trained"] for line in counted),
        "staleness_max": max(line["staleness/max"] for line in counted),
        "engine_idle_share": sum(line["engine/idle_share"] for line in counted) / len(counted),
        "trainer_idle_share": sum(line["trainer/idle_share"] for line in counted) / len(counted),
    }


async def generated(config: RunConfig) -> tuple[float, list[Group]]:
    """Seconds that the engine needs alone for the groups of the counted steps; the groups of all steps."""
    version = Version(1, 0)
    server = await asyncio.to_thread(
        start_engine, config.engine, config.model, version, config.run_dir / "generation.log", 0
    )
    try:
        await server.wait_ready()
        router = Router([server.client()])
        endpoint = Endpoint(router, ChatTemplate.load(config.model), EndpointOptions())
        await endpoint.start()

        def open_session(spec: SessionSpec) -> Session:
            return endpoint.open(
                spec.id,
                seed=spec.seed,
                training=True,
                temperature=1.0,
                max_tokens=spec.max_tokens,
                deadline=spec.deadline,
            )

        player = Player(config.rollout, make_env=Talk, make_agent=Talker, open_session=open_session)
        slots = asyncio.Semaphore(config.rollout.concurrency or 256)

        async def one(group: int, sample: int) -> Episode:
            async with slots:
                row = {"topic": f"train {group}"}
                spec = EpisodeSpec(group=group, sample=sample, attempt=0, seed=group, row=row)
                return (await player.play(spec, Sampling("g", group * 1000 + sample, True, 1.0))).episode

        async def all_of(groups: range) -> list[Group]:
            samples = config.rollout.samples
            played = await asyncio.gather(*(one(g, k) for g in groups for k in range(samples)))
            return [Group(g, 0, 0, "talk", tuple(e for e in played if e.group == g)) for g in groups]

        size = config.train.batch_groups
        groups = await all_of(range(FIRST * size))
        begin = time.monotonic()
        groups += await all_of(range(FIRST * size, config.train.steps * size))
        seconds = time.monotonic() - begin
        await endpoint.stop()
        await router.close()
        return seconds, groups
    finally:
        await server.stop()


class Replay:
    """Feeds recorded groups to a trainer, and notes when each step ended."""

    def __init__(self, batches: Sequence[Sequence[Group]]) -> None:
        self.batches = batches
        self.ends: list[float] = []

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        """The batch of a step."""
        if step > len(self.batches):
            raise RunIsOver("every recorded batch was replayed")
        return Batch(step, self.batches[step - 1], {})

    async def metrics(self, report: StepMetrics) -> None:
        """A step is done."""
        self.ends.append(time.monotonic())

    async def weights(self, ready: WeightsReady) -> None:
        """Nobody samples from them."""

    async def checkpoint(self, ready: CheckpointReady) -> None:
        """Nobody resumes from it."""

    async def phase(self, phase: Phase) -> None:
        """Alive."""


async def replayed(config: RunConfig, groups: Sequence[Group]) -> float:
    """Seconds that the trainer needs alone for these groups."""
    size = config.train.batch_groups
    replay = Replay([groups[i : i + size] for i in range(0, len(groups), size)])
    feed = FeedServer(replay, replay)
    url = await feed.start()
    folder = config.run_dir / "replay"
    await feed.begin(1)
    job = TrainerJob(
        run="replay",
        train=config.train,
        algorithm=config.algorithm,
        model_dir=config.model.absolute(),
        feed_url=url,
        weights_dir=folder / "weights",
        checkpoints_dir=folder / "checkpoints",
    )
    for made in (job.weights_dir, job.checkpoints_dir):
        made.mkdir(parents=True)
    group = TrainerGroup(job, folder / "trainer.json", folder / "trainer.log", feed.token)
    try:
        while len(replay.ends) < config.train.steps:
            if group.child.poll() is not None:
                raise SystemExit(f"the replaying trainer ended early:\n{group.child.tail()}")
            await asyncio.sleep(0.02)
    finally:
        await group.child.stop()
        await feed.stop()
    return replay.ends[-1] - replay.ends[FIRST - 1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        model = make_tiny_model(place / "model", hidden=64, layers=2)
        path = place / "run.toml"
        agent = f'[agent]\npath = "{Path(__file__).resolve()}:Talker"\n'
        path.write_text(CONFIG.replace("MODEL", str(model)).replace("DIR", scratch) + agent)
        steps = [f"train.steps={options.steps}"]
        waits = [*steps, "env.args={wait=0.2}"]
        runs = {
            "async": trained(path, "async", steps),
            "sync": trained(path, "sync", [*steps, "rollout.staleness=0"]),
            "async_tool": trained(path, "async_tool", waits),
            "sync_tool": trained(path, "sync_tool", [*waits, "rollout.staleness=0"]),
        }
        config = load(RunConfig, path, ['name="alone"', *steps])
        generation, groups = asyncio.run(generated(config))
        training = asyncio.run(replayed(config, groups))
    for name, run in runs.items():
        told = {key: round(value, 3) for key, value in run.items()}
        print(name, json.dumps({**told, "tokens_per_s": round(run["trained_tokens"] / run["seconds"])}))
    print(
        json.dumps(
            {
                "steps": options.steps - FIRST,
                "async_s": round(runs["async"]["seconds"], 2),
                "sync_s": round(runs["sync"]["seconds"], 2),
                "generation_only_s": round(generation, 2),
                "training_only_s": round(training, 2),
                "ratio": round(runs["sync"]["seconds"] / runs["async"]["seconds"], 3),
                "overlap_efficiency": round(max(generation, training) / runs["async"]["seconds"], 3),
                "ratio_with_tool_latency": round(runs["sync_tool"]["seconds"] / runs["async_tool"]["seconds"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
