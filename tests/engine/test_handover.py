"""Weights over a process group: they arrive, and whatever breaks on the way ends from the folder or changes nothing.

The trainer's side is played with its own calls of the feed and its own `join`; the engines are real, and so is all that
lies between.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from agentrl.conductor.feed import WeightsReady
from agentrl.conductor.handover import Handover, ReceiveAsked, _Transfer
from agentrl.conductor.publish import WeightsLost
from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.router import PublishReport, Router
from agentrl.engine.server import EngineServer
from agentrl.engine.types import Completion
from agentrl.errors import EngineError
from agentrl.testing.scripted_server import ScriptedServer
from agentrl.train.meeting import join
from agentrl.types import Version
from tests.engine.conftest import Models
from tests.engine.kit import request, until

WAIT = datetime.timedelta(seconds=60)


class Sender:
    """Rank 0: what `agentrl.train.broadcast` and the feed say and do, step by step."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.store = TCPStore("127.0.0.1", 0, None, True, WAIT, False)
        self.held = ""
        self.group: Any = None

    async def meet(self) -> bool:
        asked = {"held": self.held, "address": "127.0.0.1", "port": self.store.port, "backend": "gloo"}
        async with self.http.post("/group", json=asked) as response:
            told = await response.json()
        if told["name"] not in ("", self.held):
            self.group = await asyncio.to_thread(join, self.store, told["name"], 0, told["world"], told["backend"])
            self.held = told["name"]
        return bool(told["name"])

    async def announce(self, version: Version, folder: Path, buckets: list[dict[str, Tensor]]) -> bool:
        described = [
            {
                "names": list(bucket),
                "dtypes": [str(t.dtype).removeprefix("torch.") for t in bucket.values()],
                "shapes": [list(t.shape) for t in bucket.values()],
            }
            for bucket in buckets
        ]
        asked = {"step": version.number, "version": str(version), "path": str(folder), "buckets": described}
        async with self.http.post("/receive", json=asked) as response:
            return bool((await response.json())["go"])

    async def send(self, bucket: dict[str, Tensor]) -> None:
        flat = torch.cat([t.contiguous().flatten().view(torch.uint8) for t in bucket.values()])
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        await asyncio.to_thread(lambda: self.group.broadcast([flat], options).wait(WAIT))


class Scene:
    """One engine, its router, and the handover between them and a sender; what is offered is published at once."""

    def __init__(self, client: EngineClient, options: EngineOptions, models: Models) -> None:
        self.models, self.client = models, client
        self.router = Router([self.client])
        self.handover = Handover(options, lambda: self.router, self._offer, self._note)
        self.notes: list[str] = []
        self.publishing: asyncio.Task[PublishReport] | None = None

    def _note(self, text: str) -> None:
        self.notes.append(text)

    def _offer(self, ready: WeightsReady) -> None:
        self.publishing = asyncio.create_task(self.publish(Path(ready.path), Version.parse(ready.version)))

    async def publish(self, path: Path, version: Version) -> PublishReport:
        return await self.router.publish(path, version, await self.handover.load(version))

    async def done(self) -> PublishReport:
        assert self.publishing is not None
        return await asyncio.wait_for(self.publishing, 100)

    def folder(self, number: int, version: Version) -> WeightsReady:
        path = str(self.models.folders[number])
        return WeightsReady(step=version.number, version=str(version), path=path, seconds=0.1)

    async def close(self) -> None:
        await self.handover.close()
        await self.router.close()


@pytest.fixture
async def scene(server: EngineServer, models: Models) -> AsyncIterator[Scene]:
    made = Scene(server.client(), server.options, models)
    await made.client.resume()
    version = models.next_version()
    await made.router.publish(models.folders[0], version)
    yield made
    await made.close()


@asynccontextmanager
async def feed(scene: Scene) -> AsyncIterator[aiohttp.ClientSession]:
    """The conductor's calls, served."""
    app = web.Application(client_max_size=1 << 24)
    scene.handover.routes(app)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as http:
        yield http
    await runner.cleanup()


@pytest.fixture
async def sender(scene: Scene) -> AsyncIterator[Sender]:
    async with feed(scene) as http:
        yield Sender(http)


def buckets_of(folder: Path) -> list[dict[str, Tensor]]:
    """Three, as the trainer would cut them."""
    tensors = list(load_file(folder / "model.safetensors").items())
    third = len(tensors) // 3
    return [dict(tensors[:third]), dict(tensors[third : 2 * third]), dict(tensors[2 * third :])]


async def test_weights_arrive_while_requests_run(scene: Scene, sender: Sender, models: Models) -> None:
    """As one swap at one token, with the checksums of the same weights from disk; the group serves the next one too."""
    old = scene.client.version
    scene.client._chunk = 20  # the engine does not get ahead of a test that stands still
    versions = [models.next_version(), models.next_version()]
    held = set()
    seen: list[Completion] = []
    assert await sender.meet()
    running = asyncio.create_task(scene.router.generate(request("long", [7] * 30, max_tokens=900), seen.append))
    await until(lambda: seen)
    for number, version in zip((1, 2), versions, strict=True):
        buckets = buckets_of(models.folders[number])
        assert await sender.meet()
        held.add(sender.held)
        assert await sender.announce(version, models.folders[number], buckets)
        for bucket in buckets:
            await sender.send(bucket)
        report = await scene.done()
        assert report.updated == (scene.client.url,)
        assert scene.handover.carried == version
        assert scene.handover.arrived(scene.folder(number, version))
        assert (await scene.client.model_info()).version == version
    spans = (await running).spans
    assert [s.version for s in spans] == [v for v in (old, *versions) if v in {s.version for s in spans}]
    assert len(spans) > 1
    assert len(held) == 1
    sums = await scene.client.checksums()
    await scene.router.publish(models.folders[2], models.next_version())
    assert await scene.client.checksums() == sums
    await scene.router.publish(models.folders[1], models.next_version())
    assert await scene.client.checksums() != sums
    assert scene.notes == []


async def test_a_sender_that_breaks_off_is_followed_by_the_folder(scene: Scene, sender: Sender, models: Models) -> None:
    """The engine that got a part waits, loads the folder and goes on, with tokens of no version in between."""
    old, version = scene.client.version, models.next_version()
    buckets = buckets_of(models.folders[1])
    running = asyncio.create_task(scene.router.generate(request("long", [7] * 30, max_tokens=300)))
    assert await sender.meet()
    assert await sender.announce(version, models.folders[1], buckets)
    await sender.send(buckets[0])
    sender.group = None  # its connections close
    await until(lambda: scene.notes)
    assert "did not reach" in scene.notes[0]
    assert scene.publishing is not None
    assert not scene.publishing.done()
    assert scene.handover.arrived(scene.folder(1, version))
    report = await scene.done()
    assert report.failed == {}
    assert scene.handover.carried is None
    assert (await scene.client.model_info()).version == version
    assert {s.version for s in (await running).spans} <= {old, version}
    sums = await scene.client.checksums()
    await scene.router.publish(models.folders[1], models.next_version())
    assert await scene.client.checksums() == sums
    # The next transfer begins with a new group.
    assert await sender.meet()
    version = models.next_version()
    buckets = buckets_of(models.folders[2])
    assert await sender.announce(version, models.folders[2], buckets)
    for bucket in buckets:
        await sender.send(bucket)
    await scene.done()
    assert scene.handover.carried == version


async def test_a_trainer_that_ends_while_it_sends_leaves_the_old_weights(
    scene: Scene, sender: Sender, models: Models
) -> None:
    """An engine with a mixture serves nothing before it has loaded the old weights again."""
    old = scene.client.version
    sums = await scene.client.checksums()
    version = models.next_version()
    buckets = buckets_of(models.folders[1])
    assert await sender.meet()
    assert await sender.announce(version, models.folders[1], buckets)
    await sender.send(buckets[0])
    sender.group = None  # its connections close
    scene.handover.abandon()
    with pytest.raises(EngineError):
        await scene.done()
    completion = await scene.router.generate(request("after", [7] * 8, max_tokens=4))
    assert [s.version for s in completion.spans] == [old]
    assert await scene.client.checksums() == sums
    assert await scene.handover.load(version) is None


async def test_engines_that_cannot_meet_are_served_from_folders(models: Models) -> None:
    """And the same engines are not asked again: here they are too old to know the calls."""
    async with ScriptedServer(lambda tokens: tokens[-1:]) as server:
        scene = Scene(EngineClient(server.url), EngineOptions(), models)
        async with feed(scene) as http:
            asked = {"held": "", "address": "127.0.0.1", "port": 1, "backend": "gloo"}
            async with http.post("/group", json=asked) as response:
                assert (await response.json())["world"] == 2
            sender = Sender(http)
            version, folder = models.next_version(), models.folders[1]
            assert not await sender.announce(version, folder, buckets_of(folder))
            assert scene.publishing is None
            assert not scene.handover.arrived(scene.folder(1, version))
            assert not await sender.meet()
        assert "folders are used instead" in scene.notes[0]
        assert scene.router.serving == (server.url,)
        await scene.close()


async def test_a_folder_that_is_written_slowly_is_asked_for_again_and_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("agentrl.conductor.handover.FOLDER_SECONDS", 0.05)
    router, version = Router([EngineClient("http://127.0.0.1:9")]), Version(1, 7)
    handover = Handover(EngineOptions(), lambda: router, lambda ready: None, lambda text: None)
    asked = ReceiveAsked(step=7, version=str(version), path=str(tmp_path), buckets=())
    handover._now = _Transfer(asked, ["http://an.engine.that.left"])
    with pytest.raises(EngineError, match=r"no folder of weights 1\.7") as caught:
        await handover.load(version)
    assert not isinstance(caught.value, WeightsLost)
    assert handover.arrived(WeightsReady(step=7, version=str(version), path=str(tmp_path), seconds=900.0))
    assert await handover.load(version) is None, "it is loaded from the folder"
    await router.close()
