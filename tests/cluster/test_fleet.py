"""Engines that join, leave, die and dawdle, over real workers with scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from agentrl.cluster.fleet import RemoteFleet
from agentrl.cluster.hub import Hub
from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.scripted import ScriptedEngine
from agentrl.cluster.worker import Worker, WorkerOptions
from agentrl.conductor.desk import Desk, close_log, open_log
from agentrl.conductor.folder import RunFolder
from agentrl.engine.options import EngineOptions
from agentrl.engine.types import GenerateRequest, Sampling
from agentrl.monitor.live import make_view
from agentrl.monitor.metrics import MetricsFile
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Version

TOKEN = "a-token-for-the-tests-only"
PATIENCE = 60.0


async def until(what: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + PATIENCE
    while not what():
        assert asyncio.get_running_loop().time() < end, "it did not come to that in time"
        await asyncio.sleep(0.02)


class Cluster:
    """A hub, a fleet over it, and workers in this process."""

    def __init__(self, place: Path, hub: Hub, fleet: RemoteFleet, desk: Desk) -> None:
        self.place, self.hub, self.fleet, self.desk = place, hub, fleet, desk
        self.workers: list[tuple[Worker, asyncio.Task[int]]] = []
        self.model = place / "model"

    def add(self) -> Worker:
        number = len(self.workers)
        options = WorkerOptions("engine", self.hub.url, TOKEN, name=str(number))
        folder = self.place / f"host-{number}"
        folder.mkdir()
        worker = Worker(options, folder, make_engine=ScriptedEngine)
        self.workers.append((worker, asyncio.create_task(worker.run())))
        return worker

    def engine(self, worker: Worker) -> ScriptedEngine:
        assert isinstance(worker.work, ScriptedEngine)
        return worker.work

    def weights(self, version: Version) -> Path:
        folder = self.place / "weights" / str(version)
        make_tiny_model(folder, layers=1, hidden=16, heads=2, kv_heads=2, intermediate=16, seed=version.number)
        return folder

    async def generate(self, session: str) -> Version:
        now = asyncio.get_running_loop().time()
        request = GenerateRequest(session, session, np.array([1, 2, 3], np.int32), Sampling(8), now + PATIENCE)
        return (await self.fleet.router.generate(request)).spans[0].version


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    make_tiny_model(tmp_path / "model", layers=1, hidden=16, heads=2, kv_heads=2, intermediate=16)
    folder = RunFolder(tmp_path / "run")
    folder.open(resume=False)
    desk = Desk(folder, MetricsFile(folder.metrics), make_view("r", 1), open_log(folder))
    # Generous: a shared machine may stop this process for seconds.
    slow = getattr(request, "param", 60.0)
    options = ClusterOptions(kind="external", port=0, lost_seconds=60.0, slow_seconds=slow)
    hub = Hub(options, TOKEN, run="r", note=desk.note)
    await hub.start({})

    async def bring(path: Path, version: Version) -> None:
        assert path.is_dir()  # noqa: ASYNC240

    fleet = RemoteFleet(
        EngineOptions(count=2), tmp_path / "model", desk, hub, restarts=3, silent_seconds=30.0, bring=bring
    )
    found = Cluster(tmp_path, hub, fleet, desk)
    watching = asyncio.create_task(hub.run())
    yield found
    watching.cancel()
    await fleet.stop()
    for worker, _ in found.workers:
        worker.stop()
    await asyncio.gather(*(task for _, task in found.workers))
    await hub.stop()
    close_log(desk.log)
    desk.metrics.close()
    folder.close()


async def test_engines_join_serve_change_weights_and_leave(cluster: Cluster) -> None:
    first, _ = cluster.add(), cluster.add()
    router = await cluster.fleet.start(cluster.model, Version(1, 0))
    running = asyncio.create_task(cluster.fleet.run())
    assert len(router.serving) == 2
    assert await cluster.generate("a") == Version(1, 0)

    report = await cluster.fleet.publish(cluster.weights(Version(1, 1)), Version(1, 1))
    assert (len(report.updated), report.failed) == (2, {})
    assert len({tuple(sums.items()) for sums in (await router.checksums()).values()}) == 1
    held = [sorted(p.name for p in cluster.place.glob(f"host-{n}/folders/*")) for n in (0, 1)]
    assert all("weights-1.1" in names for names in held)

    late = cluster.add()
    await until(lambda: len(router.serving) == 3)
    assert cluster.engine(late).server.version == "1.1", "a new one has the current weights before it serves"  # type: ignore[union-attr]

    first.stop()
    await until(lambda: len(router.serving) == 2)
    assert await cluster.generate("a") == Version(1, 1)
    report = await cluster.fleet.publish(cluster.weights(Version(1, 2)), Version(1, 2))
    assert len(report.updated) == 2
    await until(lambda: not list(cluster.place.glob("host-2/folders/weights-1.1")))
    running.cancel()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cluster", [10.0], indirect=True)
async def test_a_slow_engine_is_left_behind_and_comes_back_when_it_has_caught_up(cluster: Cluster) -> None:
    slow, _ = cluster.add(), cluster.add()
    router = await cluster.fleet.start(cluster.model, Version(1, 0))
    running = asyncio.create_task(cluster.fleet.run())
    server = cluster.engine(slow).server
    assert server is not None
    server.control_delay = 3600.0
    report = await cluster.fleet.publish(cluster.weights(Version(1, 1)), Version(1, 1))
    assert len(report.updated) == 1
    assert "took longer than 10 s" in next(iter(report.failed.values()))
    assert await cluster.generate("a") == Version(1, 1)
    server.control_delay = 0.0
    await until(lambda: len(router.serving) == 2)
    assert server.version == "1.1"
    running.cancel()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_an_engine_that_dies_is_started_again_with_the_current_weights(cluster: Cluster) -> None:
    one, _ = cluster.add(), cluster.add()
    router = await cluster.fleet.start(cluster.model, Version(1, 0))
    running = asyncio.create_task(cluster.fleet.run())
    await cluster.fleet.publish(cluster.weights(Version(1, 1)), Version(1, 1))
    before = cluster.engine(one)
    before.fail("its GPU fell off the bus")
    await until(lambda: one.work is not before and len(router.serving) == 2)
    server = cluster.engine(one).server
    assert server is not None
    assert server.version == "1.1"
    assert cluster.fleet.deaths == 1
    running.cancel()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_worker_that_nobody_answers_ends_its_engine_before_it_is_given_up(cluster: Cluster) -> None:
    one, _ = cluster.add(), cluster.add()
    await cluster.fleet.start(cluster.model, Version(1, 0))
    running = asyncio.create_task(cluster.fleet.run())
    engine = cluster.engine(one)
    lease = next(m for m in cluster.hub.members("engine") if m.join.name == "0")
    cluster.hub.lose(lease, "the test cut it off")
    await until(lambda: one.work is not engine)
    await until(lambda: len(cluster.fleet.router.serving) == 2)
    assert cluster.engine(one).task.generation > engine.task.generation
    assert [m.join.name for m in cluster.hub.members("engine")].count("0") == 1
    running.cancel()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_folder_that_was_not_fetched_is_not_loaded(cluster: Cluster) -> None:
    cluster.add(), cluster.add()
    await cluster.fleet.start(cluster.model, Version(1, 0))
    member = cluster.hub.members("engine")[0]
    body = {"model_path": "weights-9.9", "weight_version": "9.9"}
    async with cluster.hub.http.post(f"{member.join.address}/engine/update_weights_from_disk", json=body) as answer:
        assert answer.status == 409
    async with cluster.hub.http.post(
        f"{member.join.address}/engine/update_weights_from_disk", json={**body, "model_path": "/etc"}
    ) as answer:
        assert answer.status == 409, "no path of a request reaches the disk"
