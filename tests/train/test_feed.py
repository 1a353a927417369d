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


def until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not so():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.01)


async def test_groups_are_fetched_a_few_at_a_time() -> None:
    """A conductor that answers none before as many as may be are asked for."""
    groups = [random_group(number, np.random.default_rng(number)) for number in range(1, 25)]
    asked, most, full = 0, 0, asyncio.Event()

    class Many(Source):
        async def take(self, step: int, version: Version, wait: float) -> Batch | None:
            return Batch(7, groups, {})

    @web.middleware
    async def busy(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal asked, most
        if "/group/" not in request.path:
            return await handler(request)
        asked += 1
        most = max(most, asked)
        if asked == FETCHES:
            full.set()
        await asyncio.wait_for(full.wait(), 60.0)
        asked -= 1
        return await handler(request)

    server = FeedServer(Many(), Events(), routes=lambda app: app.middlewares.append(busy))
    url = await server.start()
    await server.begin(1)

    def client() -> None:
        feed = Feed(url, server.token)
        feed.take(1, Version(1, 0))
        found = feed.groups(7, [group.id for group in groups])
        assert found == {group.id: decode_group(encode_group(group, messages=False)) for group in groups}
        assert feed.groups(7, []) == {}
        with pytest.raises(RunError, match=r"404.*group 99"):
            feed.groups(7, [1, 99, 2])
        feed.close()

    try:
        await asyncio.to_thread(client)
    finally:
        await server.stop()
    assert most == FETCHES
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]


async def test_phases_beat_at_every_change() -> None:
    events = Events()
    server = FeedServer(Source(), events)
    url = await server.start()

    def beats(phase: str, step: int) -> int:
        return sum(isinstance(p, Phase) and (p.rank, p.phase, p.step) == (1, phase, step) for p in list(events.seen))

    def client() -> None:
        began = time.perf_counter()
        phases = Phases(url, server.token, rank=1)
        for step, name in enumerate(("fetch", "train", "train")):
            with phases.phase(name, step):
                # The beat of a change: the next one would come after 5 s, with the same phase.
                until(lambda name=name, step=step: beats(name, step) > 0)  # type: ignore[misc]
                time.sleep(0.1)
        elapsed, spent = time.perf_counter() - began, phases.drain()
        assert set(spent) == {"fetch", "train"}
        assert 0.2 <= spent["train"] <= elapsed - spent["fetch"]
        assert phases.drain() == {}
        phases.close()

    try:
        await asyncio.to_thread(client)
        await asyncio.to_thread(until, lambda: not [t for t in threading.enumerate() if t.name == "heartbeat"])
    finally:
        await server.stop()


async def test_a_connection_that_is_lost_while_an_answer_is_waited_for_is_made_again() -> None:
    """However long the answer had been waited for: a `/take` is held for twice as long as a feed may be away."""
    asked: list[str] = []

    @web.middleware
    async def cut_once(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked.append(request.path)
        if len(asked) == 1:
            await asyncio.sleep(0.3)
            assert request.transport is not None
            request.transport.abort()
        return await handler(request)

    server = FeedServer(Source(), Events(), routes=lambda app: app.middlewares.append(cut_once))
    url = await server.start()
    await server.begin(1)
    feed = Feed(url, server.token, patience=0.1)
    try:
        assert isinstance(await asyncio.to_thread(feed.take, 1, Version(1, 0)), bytes)
    finally:
        feed.close()
        await server.stop()
    assert asked == ["/take", "/take"]


def test_a_lost_feed_ends_with_the_cause() -> None:
    feed = Feed("http://127.0.0.1:9", "x", patience=0.3)
    with pytest.raises(RunError, match=r"feed http://127.0.0.1:9 is lost.*--resume"):
        feed.take(1, Version(1, 0))
