"""The trainer's client against the conductor's real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
import orjson
import pytest
from aiohttp import web

from agentrl.conductor.feed import (
    Batch,
    CheckpointReady,
    FeedServer,
    Phase,
    RunIsOver,
    StepMetrics,
    WeightsReady,
)
from agentrl.errors import RunError
from agentrl.train import manifest
from agentrl.train.feed import FETCHES, Feed, Over, Phases
from agentrl.types import Version
from agentrl.wire import decode_group, encode_group
from tests.train.drawing import random_group

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GROUP = random_group(5, np.random.default_rng(0))


class Source:
    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        if step == 1:
            return Batch(7, [GROUP], {"row": 8})
        if step == 2:
            await asyncio.sleep(wait)
            return None
        raise RunIsOver("no rows are left")


class Events:
    def __init__(self) -> None:
        self.seen: list[object] = []

    async def weights(self, ready: WeightsReady) -> None:
        self.seen.append(ready)

    async def metrics(self, report: StepMetrics) -> None:
        self.seen.append(report)

    async def checkpoint(self, ready: CheckpointReady) -> None:
        self.seen.append(ready)

    async def phase(self, phase: Phase) -> None:
        self.seen.append(phase)


async def test_every_call_of_the_feed() -> None:
    events = Events()
    server = FeedServer(Source(), events, hold=0.2)
    url = await server.start()
    await server.begin(1)
    version = Version(1, 0)

    def client() -> None:
        feed = Feed(url, server.token)
        data = feed.take(1, version)
        assert isinstance(data, bytes)
        taken = manifest.parse(orjson.loads(data))
        assert (taken.take, taken.step, taken.version, taken.cursor) == (7, 1, version, {"row": 8})
        assert [e.reward for e in taken.groups[0].episodes] == [e.reward for e in GROUP.episodes]
        assert feed.group(7, 5) == decode_group(encode_group(GROUP, messages=False))
        assert feed.take(2, version) is None
        assert feed.take(3, version) == Over("no rows are left")
        feed.weights(1, Version(1, 1), "/w/1.1", 0.5)
        feed.metrics(1, Version(1, 1), {"loss": 1.5})
        feed.checkpoint(1, Version(1, 1), "/c/1", 7, {"row": 8})
        feed.phase(0, "train", 1)
        with pytest.raises(RunError, match=r"404.*group 9"):
            feed.group(7, 9)
        with pytest.raises(RunError, match="409"):
            feed.take(1, Version(2, 0))
        stranger = Feed(url, "wrong")
        with pytest.raises(RunError, match="401"):
            stranger.take(1, version)
        stranger.close()
        feed.close()

    try:
        await asyncio.to_thread(client)
    finally:
        await server.stop()
    assert [type(s) for s in events.seen] == [WeightsReady, StepMetrics, CheckpointReady, Phase]


async def test_groups_are_fetched_a_few_at_a_time() -> None:
    """A conductor that lets each answer wait 50 ms, as a busy one does."""
    groups = [random_group(number, np.random.default_rng(number)) for number in range(1, 25)]
    asked, most = 0, 0

    class Many(Source):
        async def take(self, step: int, version: Version, wait: float) -> Batch | None:
            return Batch(7, groups, {})

    @web.middleware
    async def busy(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await asyncio.sleep(0.05)
        asked -= 1
        return await handler(request)

    server = FeedServer(Many(), Events(), routes=lambda app: app.middlewares.append(busy))
    url = await server.start()
    await server.begin(1)

    def client() -> float:
        feed = Feed(url, server.token)
        feed.take(1, Version(1, 0))
        begin = time.monotonic()
        found = feed.groups(7, [group.id for group in groups])
        seconds = time.monotonic() - begin
        assert found == {group.id: decode_group(encode_group(group, messages=False)) for group in groups}
        assert feed.groups(7, []) == {}
        with pytest.raises(RunError, match=r"404.*group 99"):
            feed.groups(7, [1, 99, 2])
        feed.close()
        return seconds

    try:
        seconds = await asyncio.to_thread(client)
    finally:
        await server.stop()
    assert 1 < most <= FETCHES
    assert seconds < 24 * 0.05
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]


async def test_phases_beat_at_every_change() -> None:
    events = Events()
    server = FeedServer(Source(), events)
    url = await server.start()

    def client() -> None:
        phases = Phases(url, server.token, rank=1)
        for name in ("fetch", "train", "train"):
            with phases.phase(name, 4):
                time.sleep(0.1)
        spent = phases.drain()
        assert spent["train"] == pytest.approx(0.2, abs=0.15)
        assert phases.drain() == {}
        phases.close()

    try:
        await asyncio.to_thread(client)
    finally:
        await server.stop()
    assert {(p.rank, p.phase) for p in events.seen if isinstance(p, Phase)} >= {(1, "fetch"), (1, "train")}
    assert not [t for t in threading.enumerate() if t.name == "heartbeat"]


def test_a_lost_feed_ends_with_the_cause() -> None:
    feed = Feed("http://127.0.0.1:9", "x", patience=0.3)
    with pytest.raises(RunError, match=r"feed http://127.0.0.1:9 is lost.*--resume"):
        feed.take(1, Version(1, 0))
