"""Where a run's processes run, behind one interface: on this machine, or on workers that register.

local      engines and trainer are children of the conductor; so are rollout workers, where there are any
external   `agentrl worker` processes, started by Slurm, Kubernetes or hand, register at the conductor's hub
ray        the same workers, placed and started again by Ray (agentrl/cluster/ray.py)
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from agentrl.child import LOGS_VARIABLE, Child
from agentrl.cluster.files import read_token
from agentrl.cluster.fleet import RemoteFleet, drop, weights_name
from agentrl.cluster.hub import Hub
from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.protocol import Source
from agentrl.cluster.ranks import Ranks
from agentrl.cluster.rollouts import Rollouts, check_rows
from agentrl.conductor.config import RunConfig
from agentrl.conductor.desk import Desk
from agentrl.conductor.engines import Fleet
from agentrl.conductor.feed import CommitRequest, FeedServer, WeightsReady
from agentrl.conductor.meter import MeteredEngine
from agentrl.conductor.publish import WeightsLost
from agentrl.conductor.supervise import MakeGroup
from agentrl.conductor.watchdog import Wait
from agentrl.engine.router import PublishReport, Router
from agentrl.errors import RunError
from agentrl.rollout.player import Plays
from agentrl.types import Episode, Row, Version

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_TICK = 0.5


class EngineFleet(Protocol):
    """A run's engines: `Fleet` on this machine, `RemoteFleet` on others."""

    deaths: int

    @property
    def router(self) -> Router:
        """The engines as one; only after `start`."""
        ...

    async def start(self, model_dir: Path, version: Version) -> Router:
        """Have them serve the weights in `model_dir`."""
        ...

    async def run(self) -> None:
        """Keep them, until cancelled."""
        ...

    async def publish(self, path: Path, version: Version) -> PublishReport:
        """Change their weights."""
        ...

    async def serving(self) -> None:
        """Wait until one serves."""
        ...

    async def counters(self) -> list[dict[str, Any]]:
        """What they count."""
        ...

    def waits(self) -> Sequence[Wait]:
        """For the watchdog."""
        ...

    async def stop(self) -> None:
        """End them, or let them go."""
        ...


class Launcher(Protocol):
    """Brings a run's processes up, wherever that is.

    ```python
    launcher = make_launcher(config, desk, weights, rows)
    url = await launcher.open(feed)              # what trainer ranks are given
    router = await launcher.fleet.start(model, version)
    player = launcher.player(engine)             # None: episodes run in this process
    keeping = asyncio.create_task(launcher.run())
    await launcher.close()
    ```
    """

    @property
    def fleet(self) -> EngineFleet:
        """The engines."""
        ...

    @property
    def make_group(self) -> MakeGroup | None:
        """How a trainer's group starts; None: as children of this process."""
        ...

    async def open(self, feed: FeedServer) -> str:
        """Listen; the feed's URL."""
        ...

    def player(self, engine: MeteredEngine) -> Plays | None:
        """Who plays episodes; None: this process."""
        ...

    def located(self, ready: WeightsReady) -> WeightsReady:
        """The same, with the folder in which the weights will be on this host when they are published."""
        ...

    async def commit(self, asked: CommitRequest) -> Path:
        """Make a checkpoint whole whose parts lie on several hosts."""
        ...

    async def run(self) -> None:
        """Keep the workers, until cancelled; RunError where that cannot be."""
        ...

    async def close(self) -> None:
        """Let everybody go."""
        ...


def make_launcher(config: RunConfig, desk: Desk, weights: Path, rows: Sequence[Row]) -> Launcher:
    """The launcher of `cluster.kind`. `weights` is this host's folder for weights on their way.

    ConfigError where a row cannot go to a rollout worker.
    """
    if config.cluster.rollout_workers:
        check_rows(rows)
    if config.cluster.kind == "local":
        return LocalLauncher(config, desk)
    if config.cluster.kind == "ray":
        from agentrl.cluster.ray import RayLauncher  # an optional extra

        return RayLauncher(config, desk, weights)
    return RemoteLauncher(config, desk, weights, read_token(config.cluster.token_file))


class Players:
    """The rollout workers of a hub."""

    def __init__(self, config: RunConfig, desk: Desk, hub: Hub) -> None:
        self._config, self._desk, self._hub = config, desk, hub
        self._engine: MeteredEngine | None = None
        self._urls: Callable[[], Sequence[str]] = tuple
        self.rollouts = Rollouts(
            hub,
            config.model_dump(mode="json", exclude_unset=True),
            Source(name=f"template-{hub.nonce}", urls=()),
            lambda: self._urls(),
            self._busy,
            self._count,
            desk.note,
        )

    def open(self, engine: MeteredEngine, urls: Callable[[], Sequence[str]]) -> Rollouts:
        """They may begin."""
        self._engine, self._urls = engine, urls
        return self.rollouts

    def share_template(self) -> None:
        """Serve the model's folder without its weights: all that an endpoint needs."""
        folder = self._desk.folder.path / "template"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in self._config.model.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, folder / path.name)
        source = Source(name=f"template-{self._hub.nonce}", urls=(self._hub.url,))
        self._hub.shelf.put(source.name, folder)
        self.rollouts.model = source

    def _busy(self) -> Any:
        assert self._engine is not None
        return self._engine.elsewhere()

    def _count(self, episode: Episode) -> None:
        assert self._engine is not None
        self._engine.tokens += sum(int(t.loss_mask.sum()) for t in episode.trajectories)


class LocalLauncher:
    """Everything on this machine."""

    make_group: MakeGroup | None = None

    def __init__(self, config: RunConfig, desk: Desk) -> None:
        self._config, self._desk = config, desk
        self.fleet: EngineFleet = Fleet(
            config.engine,
            config.model,
            desk,
            restarts=config.monitor.engine_restarts,
            silent_seconds=config.monitor.silent_seconds,
        )
        self._feed: FeedServer | None = None
        self._hub: Hub | None = None
        self._players: Players | None = None
        self._workers: list[Child] = []

    async def open(self, feed: FeedServer) -> str:
        """See `Launcher`."""
        self._feed = feed
        if self._config.cluster.rollout_workers:
            options = ClusterOptions.model_construct(kind="external", host="127.0.0.1", port=0)
            self._hub = Hub(options, secrets.token_urlsafe(24), run=self._config.name, note=self._desk.log.info)
            self._players = Players(self._config, self._desk, self._hub)
            await self._hub.start({"/rollout": self._players.rollouts.application()})
            self._players.share_template()
            for index in range(self._config.cluster.rollout_workers):
                self._workers.append(self._worker(self._hub, index))
        return await feed.start()

    def _worker(self, hub: Hub, index: int) -> Child:
        argv = [sys.executable, "-m", "agentrl.cli", "worker", "--role", "rollout", "--conductor", hub.url]
        argv += ["--name", str(index)]
        logs = self._desk.folder.logs
        environment = {"AGENTRL_CLUSTER_TOKEN": hub.token, LOGS_VARIABLE: str(logs / f"rollout-{index}")}
        return Child(f"rollout worker {index}", argv, log=logs / f"rollout-{index}.log", env=environment)

    def player(self, engine: MeteredEngine) -> Plays | None:
        """See `Launcher`."""
        if self._players is None:
            return None
        return self._players.open(engine, lambda: self.fleet.router.serving)

    def located(self, ready: WeightsReady) -> WeightsReady:
        """See `Launcher`."""
        return ready

    async def commit(self, asked: CommitRequest) -> Path:
        """See `Launcher`."""
        raise RunError(f"a trainer on this machine left the checkpoint of step {asked.step} to the conductor")

    async def run(self) -> None:
        """See `Launcher`."""
        async with asyncio.TaskGroup() as group:
            if self._hub is not None and self._players is not None:
                group.create_task(self._hub.run())
                group.create_task(self._players.rollouts.run())
                group.create_task(self._keep_workers(self._hub))

    async def _keep_workers(self, hub: Hub) -> None:
        while True:
            for index, child in enumerate(self._workers):
                if (code := child.poll()) is not None:
                    self._desk.note(f"{child.name} ended with code {code}; another one is started")
                    self._workers[index] = self._worker(hub, index)
            await asyncio.sleep(_TICK)

    async def close(self) -> None:
        """See `Launcher`."""
        await asyncio.gather(*(child.stop() for child in self._workers))
        if self._hub is not None:
            await self._hub.stop()
        if self._feed is not None:
            await self._feed.stop()
        await self.fleet.stop()


class RemoteLauncher:
    """Everything but the conductor on workers that register."""

    def __init__(self, config: RunConfig, desk: Desk, weights: Path, token: str) -> None:
        self._config, self._desk, self._weights = config, desk, weights
        shared = desk.folder.path if config.cluster.shared_disk else None
        self._hub = Hub(config.cluster, token, run=config.name, note=desk.note, probe_dir=shared)
        self.fleet: EngineFleet = RemoteFleet(
            config.engine,
            config.model.absolute(),
            desk,
            self._hub,
            restarts=config.monitor.engine_restarts,
            silent_seconds=config.monitor.silent_seconds,
            bring=self._bring,
        )
        self._players = Players(config, desk, self._hub) if config.cluster.rollout_workers else None
        self._ranks = Ranks(self._hub, desk, config.monitor.silent_seconds)
        self._offered: list[Version] = []

    @property
    def make_group(self) -> MakeGroup | None:
        """See `Launcher`."""
        return self._ranks.start

    async def open(self, feed: FeedServer) -> str:
        """See `Launcher`."""
        apps: dict[str, web.Application] = {"/feed": feed.application()}
        if self._players is not None:
            apps["/rollout"] = self._players.rollouts.application()
        url = await self._hub.start(apps)
        if self._players is not None:
            self._players.share_template()
        self._desk.note(f"waits for workers: agentrl worker --role engine|trainer|rollout --conductor {url}")
        return f"{url}/feed"

    def player(self, engine: MeteredEngine) -> Plays | None:
        """See `Launcher`."""
        if self._players is None:
            return None
        return self._players.open(engine, lambda: self.fleet.router.serving)

    def located(self, ready: WeightsReady) -> WeightsReady:
        """See `Launcher`."""
        self._offered.append(Version.parse(ready.version))
        return ready.model_copy(update={"path": str(self._weights / ready.version)})

    async def _bring(self, path: Path, version: Version) -> None:
        """Have the weights of `version` in `path`, from the host of the trainer's first rank."""
        if await asyncio.to_thread(path.is_dir):
            return
        group = self._ranks.group
        if group is None or (lead := group.lead) is None:
            raise WeightsLost("the trainer's host is gone")
        listing = await group.fetch_weights(weights_name(version), path)
        self._hub.shelf.put(weights_name(version), path, listing)
        done = [offered for offered in self._offered if offered <= version]
        self._offered = [offered for offered in self._offered if offered > version]
        await drop(self._hub, lead, [weights_name(offered) for offered in done])

    async def commit(self, asked: CommitRequest) -> Path:
        """See `Launcher`."""
        return await self._ranks.commit(asked)

    async def run(self) -> None:
        """See `Launcher`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hub.run())
            if self._players is not None:
                group.create_task(self._players.rollouts.run())

    async def close(self) -> None:
        """See `Launcher`."""
        await self.fleet.stop()
        await self._hub.stop()
