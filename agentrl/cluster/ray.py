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
TRIES = 10
"""Starts in a row of one worker that may come to nothing; on a node that is about to be missed, some do."""


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


class Starts:
    """Tells workers that cannot run from workers that are lost: those had joined."""

    def __init__(self) -> None:
        self._joins: dict[str, int] = {}
        self._in_vain: dict[str, int] = {}

    def ended(self, name: str, joins: int, how: str) -> None:
        """It ended, and has joined so often since the run began; RunError where it never does."""
        joined = joins > self._joins.get(name, 0)
        self._joins[name] = joins
        self._in_vain[name] = 0 if joined else self._in_vain.get(name, 0) + 1
        if self._in_vain[name] > TRIES:
            raise RunError(
                f"worker {name} was started {self._in_vain[name]} times in a row and never joined, at last it {how}: "
                f"see agentrl-{name}-*.log in the temporary folder of its node"
            )


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
        self._starts = Starts()
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
        told = (place.role, self._url, self._token, self._name(index), str(Path.cwd()))
        self._running[index] = self._actors[index].run.remote(*told)

    def _name(self, index: int) -> str:
        return f"{self._places[index].role}-{index}"

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
                    name = self._name(index)
                    self._starts.ended(name, self._hub.joins(name), how)
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
