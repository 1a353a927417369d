"""`cluster.kind = "ray"`: the workers of an external run, placed and started again by Ray. The conductor is the driver.

Ray places one actor a worker in a placement group; the actor has an `agentrl worker` process as its child. Everything
else (leases, fences, weights) is as if the workers had been started by hand. Needs `pip install 'agentrl[ray]'`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.child import Child
from agentrl.cluster.launcher import RemoteLauncher
from agentrl.cluster.protocol import Role
from agentrl.conductor.config import RunConfig
from agentrl.conductor.desk import Desk
from agentrl.conductor.feed import FeedServer
from agentrl.errors import ConfigError, RunError

_TICK = 0.5
STARTS, STARTS_EACH, CALM_SECONDS = 20, 3, 60.0
"""Workers that may end by themselves in so many seconds before the run does: this many, or this often each."""


class _Place(NamedTuple):
    """A bundle of the placement group."""

    role: Role
    resources: Mapping[str, float]


class Bearer:
    """The actor: it holds a worker process, which dies with it."""

    def run(self, role: str, conductor: str, token: str, name: str, folder: str) -> int:
        """Start the worker and wait for its end; its exit code."""
        import ray

        if os.path.isdir(folder):
            os.chdir(folder)  # paths of a config count from where `agentrl train` was started
        host = ray.util.get_node_ip_address()
        argv = [sys.executable, "-m", "agentrl.cli", "worker", "--role", role, "--conductor", conductor]
        argv += ["--host", host, "--name", name]
        log = Path(tempfile.gettempdir()) / f"agentrl-{name}-{os.getpid()}.log"
        # Many ranks share a host; where there is a GPU, Ray has chosen which one this actor sees.
        child = Child(name, argv, log=log, env={"AGENTRL_CLUSTER_TOKEN": token})
        return asyncio.run(child.wait())


class Ends:
    """Counts workers that end; a whole rack that is lost is not taken for workers that cannot run."""

    def __init__(self, workers: int) -> None:
        self._limit = max(STARTS, STARTS_EACH * workers)
        self._at: list[float] = []

    def count(self, now: float) -> None:
        """One more ended; RunError where it is one too many."""
        self._at = [at for at in self._at if now - at < CALM_SECONDS] + [now]
        if len(self._at) > self._limit:
            raise RunError(f"{len(self._at)} workers ended within {CALM_SECONDS:.0f} s: see their logs on the nodes")


class RayLauncher(RemoteLauncher):
    """See the module."""

    def __init__(self, config: RunConfig, desk: Desk, weights: Path) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("cluster.kind = 'ray' needs Ray: pip install 'agentrl[ray]'") from error
        self._ray: Any = ray
        options = config.cluster
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                ray.init(address=options.ray_address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"cluster.ray_address = {options.ray_address!r}: {error}") from error
        if "host" not in options.model_fields_set:
            options = options.model_copy(update={"host": _node_address(ray)})
        if "port" not in options.model_fields_set:
            options = options.model_copy(update={"port": 0})
        self._token = secrets.token_urlsafe(32)
        super().__init__(config.model_copy(update={"cluster": options}), desk, weights, self._token)
        self._places = _places(config)
        self._group_of_places: Any = None
        self._running: dict[int, Any] = {}
        self._actors: dict[int, Any] = {}
        self._ends = Ends(len(self._places))
        self._url = ""

    async def open(self, feed: FeedServer) -> str:
        """See `Launcher`."""
        url = await super().open(feed)
        self._url = url.removesuffix("/feed")
        await asyncio.to_thread(self._reserve)
        for index in range(len(self._places)):
            self._start(index)
        return url

    def _reserve(self) -> None:
        ray, options = self._ray, self._config.cluster
        bundles = [dict(place.resources) for place in self._places]
        self._group_of_places = ray.util.placement_group(bundles, strategy=options.ray_placement)
        if not self._group_of_places.wait(options.wait_seconds):
            raise RunError(
                f"Ray found no room for {bundles} ({options.ray_placement}) in {options.wait_seconds:.0f} s; the "
                f"cluster has {ray.cluster_resources()}: add nodes, or lower engine.count, train.ranks, cluster.ray_*"
            )

    def _start(self, index: int) -> None:
        place, ray = self._places[index], self._ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group_of_places, placement_group_bundle_index=index
        )
        wanted = dict(place.resources)
        actor = ray.remote(Bearer).options(
            num_cpus=wanted.pop("CPU", 0),
            num_gpus=wanted.pop("GPU", 0),
            resources=wanted,
            scheduling_strategy=strategy,
        )
        self._actors[index] = actor.remote()
        name = f"{place.role}-{index}"
        self._running[index] = self._actors[index].run.remote(place.role, self._url, self._token, name, str(Path.cwd()))

    async def run(self) -> None:
        """See `Launcher`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run())
            group.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            for index, running in list(self._running.items()):
                done, _ = await asyncio.to_thread(self._ray.wait, [running], timeout=0)
                if done:
                    how = await asyncio.to_thread(self._how, running)
                    self._desk.note(f"Ray: {self._places[index].role} worker {index} {how}; another one is started")
                    self._ends.count(time.monotonic())
                    self._start(index)

    def _how(self, running: Any) -> str:
        try:
            return f"ended with code {self._ray.get(running)}"
        except self._ray.exceptions.RayError as error:
            return f"is gone ({str(error).partition(chr(10))[0]})"

    async def close(self) -> None:
        """See `Launcher`."""
        await super().close()
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._group_of_places is not None:
            self._ray.util.remove_placement_group(self._group_of_places)
        self._ray.shutdown()


def _places(config: RunConfig) -> list[_Place]:
    options, engine = config.cluster, config.engine
    gpus = float(engine.tensor_parallel) if engine.kind == "sglang" and engine.device != "cpu" else 0.0
    for_engine = options.ray_engine or {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}
    for_trainer, for_rollout = options.ray_trainer or {"CPU": 1.0}, options.ray_rollout or {"CPU": 1.0}
    return [
        *[_Place("engine", for_engine)] * engine.count,
        *[_Place("trainer", for_trainer)] * config.train.ranks,
        *[_Place("rollout", for_rollout)] * options.rollout_workers,
    ]


def _node_address(ray: Any) -> str:
    found = str(ray.util.get_node_ip_address())
    if not ipaddress.ip_address(found).is_private:
        raise ConfigError(f"Ray knows this node by {found}, a public address: set cluster.host if you mean it")
    return found
