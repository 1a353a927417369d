"""The feed's server, asked as the trainer's ranks ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from agentrl.conductor import feed
from agentrl.conductor.feed import (
    Batch,
    CheckpointReady,
    FeedServer,
    Phase,
    RunIsOver,
    StepMetrics,
    Trace,
    WeightsReady,
)
from agentrl.train.feed import MAX_TRACE_BYTES, Feed
from agentrl.types import Context, Episode, Group, Sampled, Segment, Stop, Trajectory, Turn, Version
from agentrl.wire import decode_group


def make_group(group_id: int) -> Group:
    trajectory = Trajectory(
        (
            Segment(np.array([5, 6, 7]), None, Context()),
            Segment(np.array([8, 9]), np.array([-0.5, -0.25]), Sampled(Version(1, 3))),
        )
    )
    episode = Episode(
        group=group_id,
        sample=0,
        attempt=0,
        seed=1,
        row={"question": "2+2"},
        messages=({"role": "user", "content": "2+2"},),
        turns=(Turn(0, 0, 5, 1.0),),
        trajectories=(trajectory,),
        stop=Stop.FINISHED,
    )
    return Group(group_id, 0, 0, "calc", (episode,))


class Queue:
    """A source whose batches the test puts in."""

    def __init__(self) -> None:
        self.ready: asyncio.Queue[Batch | None] = asyncio.Queue()
        self.asked: list[tuple[int, Version]] = []

    async def take(self, step: int, version: Version, wait: float) -> Batch | None:
        self.asked.append((step, version))
        try:
            batch = await asyncio.wait_for(self.ready.get(), wait)
        except TimeoutError:
            return None
        if batch is None:
            raise RunIsOver("all 3 steps are done")
        return batch


class Reports:
    def __init__(self) -> None:
        self.got: list[Any] = []

    async def weights(self, ready: WeightsReady) -> None:
        self.got.append(ready)

    async def metrics(self, report: StepMetrics) -> None:
        self.got.append(report)

    async def checkpoint(self, ready: CheckpointReady) -> None:
        self.got.append(ready)

    async def phase(self, phase: Phase) -> None:
        self.got.append(phase)


class Setup(NamedTuple):
    feed: FeedServer
    source: Queue
    reports: Reports
    http: aiohttp.ClientSession

    async def take(self, step: int, version: str = "1.3") -> tuple[int, Any]:
        async with self.http.post("/take", json={"step": step, "version": version}) as answer:
            return answer.status, (await answer.json() if answer.status != 204 else None)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    source, reports = Queue(), Reports()
    server = FeedServer(source, reports, hold=60.0)
    url = await server.start()
    await server.begin(1)
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(url, headers=headers) as http:
        yield Setup(server, source, reports, http)
    await server.stop()


async def test_a_batch_travels_whole(setup: Setup) -> None:
    await setup.source.ready.put(Batch(4, [make_group(11), make_group(12)], {"row": 13}))
    status, manifest = await setup.take(7)
    assert status == 200
    assert (manifest["take"], manifest["step"], manifest["version"], manifest["cursor"]) == (4, 7, "1.3", {"row": 13})
    assert manifest["groups"][1] == {
        "id": 12,
        "env": "calc",
        "episodes": [
            {
                "sample": 0,
                "scored": True,
                "reward": 1.0,
                "stop": "finished",
                "turns": [[0, 0, 5, 1.0, ""]],
                "trajectories": [{"length": 5, "sampled": 2, "abandoned": False}],
            }
        ],
    }
    for _ in range(2):  # idempotent: each rank may ask, and ask again
        async with setup.http.get("/take/4/group/12") as answer:
            group = decode_group(await answer.read())
        assert group.episodes[0].trajectories == make_group(12).episodes[0].trajectories
        assert group.episodes[0].row == {}
    async with setup.http.get("/take/4/group/99") as answer:
        assert answer.status == 404


async def test_the_same_step_gets_the_same_take_and_the_next_step_a_new_one(setup: Setup) -> None:
    await setup.source.ready.put(Batch(1, [make_group(1)], {}))
    await setup.source.ready.put(Batch(2, [make_group(2)], {}))
    assert [(await setup.take(step))[1]["take"] for step in (1, 1, 2)] == [1, 1, 2]
    async with setup.http.get("/take/1/group/1") as answer:
        assert answer.status == 404, "take 1 is over"


async def test_not_yet_then_over(setup: Setup) -> None:
    setup.feed._hold = 0.3
    assert (await setup.take(1))[0] == 204
    setup.feed._hold = 60.0
    asked = len(setup.source.asked)
    held = asyncio.create_task(setup.take(1))
    async with asyncio.timeout(60):
        while len(setup.source.asked) == asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await setup.source.ready.put(None)
    assert await held == (410, {"reason": "all 3 steps are done"})
    assert await setup.take(2) == (410, {"reason": "all 3 steps are done"})


async def test_a_new_incarnation_shuts_the_old_group_out(setup: Setup) -> None:
    await setup.source.ready.put(Batch(1, [make_group(1)], {}))
    await setup.take(1)
    await setup.feed.begin(2)
    status, body = await setup.take(1, "1.3")
    assert status == 409
    assert "incarnation 1 is over" in body["error"]
    for path in ("/weights", "/metrics", "/checkpoint", "/phase", "/permit", "/commit"):
        async with setup.http.post(path, json={}) as answer:
            assert answer.status == 409, f"a group that was given up for lost handed something in at {path}"
    assert setup.reports.got == []
    await setup.source.ready.put(Batch(2, [make_group(2)], {}))
    setup.http.headers["Authorization"] = f"Bearer {setup.feed.token}"
    assert (await setup.take(1, "2.3"))[1]["take"] == 2
    status, body = await setup.take(1, "1.3")
    assert status == 409
    assert "incarnation 1 is over" in body["error"]


async def test_a_group_that_goes_back_to_a_checkpoint_is_not_told_that_the_run_is_over(setup: Setup) -> None:
    """It died after it was told so and before its last checkpoint: what it had trained on since is trained again."""
    await setup.source.ready.put(None)
    assert (await setup.take(1))[0] == 410
    await setup.feed.begin(2)
    await setup.source.ready.put(Batch(1, [make_group(1)], {}))
    setup.http.headers["Authorization"] = f"Bearer {setup.feed.token}"
    assert (await setup.take(1, "2.0"))[0] == 200


@pytest.mark.parametrize("how", ["killed", "late"])
@pytest.mark.parametrize("path", ["/weights", "/take"])
async def test_a_rank_that_is_lost_in_the_middle_of_a_request(
    setup: Setup, how: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    middle, end = asyncio.Event(), asyncio.Event()

    async def whole(request: web.Request) -> web.Response | None:
        middle.set()
        try:
            return await read_whole(request)
        finally:
            end.set()

    read_whole = feed._whole
    monkeypatch.setattr(feed, "_whole", whole)
    body = b'{"step": 1, "version": "1.1", "path": "/w/1", "seconds": 0.5}'
    size = f"Content-Length: {len(body)}"
    url = setup.http._base_url
    assert url is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {setup.feed.token}\r\n{size}\r\n\r\n"
    writer.write(head.encode() + body[:20])
    await writer.drain()
    await asyncio.wait_for(middle.wait(), 60)
    if how == "killed":
        writer.transport.abort()
    else:
        await setup.feed.begin(2)
        writer.write(body[20:])
        assert b" 409 " in await reader.readline()
    await asyncio.wait_for(end.wait(), 60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(setup.feed.broken(), 0.05)
    assert setup.reports.got == setup.source.asked == []
    writer.close()


async def test_reports_arrive_typed(setup: Setup) -> None:
    sent: list[tuple[str, dict[str, Any]]] = [
        ("/weights", {"step": 1, "version": "1.1", "path": "/w/1", "seconds": 0.5}),
        ("/metrics", {"step": 1, "version": "1.1", "metrics": {"loss": 0.5, "hist": [1, 2], "none": None}}),
        ("/checkpoint", {"step": 1, "version": "1.1", "path": "/c/1", "take": 1, "cursor": {"row": 4}}),
        ("/phase", {"rank": 0, "phase": "take", "step": 2}),
    ]
    for path, body in sent:
        async with setup.http.post(path, json=body) as answer:
            assert answer.status == 200
    assert [type(r) for r in setup.reports.got] == [WeightsReady, StepMetrics, CheckpointReady, Phase]
    assert setup.reports.got[1].metrics == {"loss": 0.5, "hist": [1, 2], "none": None}


async def test_nothing_without_the_token_and_malformed_bodies_are_named(setup: Setup) -> None:
    async with setup.http.post("/take", json={}, headers={"Authorization": "Bearer no"}) as answer:
        assert answer.status == 401
    async with setup.http.post("/weights", json={"step": "x"}) as answer:
        assert answer.status == 400
        assert "version" in (await answer.json())["error"]
    assert (await setup.take(1, "seven"))[0] == 400
    assert setup.source.asked == []
    assert setup.reports.got == []


async def test_a_failure_of_the_conductor_ends_the_run_with_its_own_error(setup: Setup) -> None:
    class Full(Reports):
        async def metrics(self, report: StepMetrics) -> None:
            raise OSError(28, "No space left on device")

    broken = FeedServer(setup.source, Full(), hold=0.3)
    url = await broken.start()
    body = {"step": 1, "version": "1.1", "metrics": {}}
    headers = {"Authorization": f"Bearer {broken.token}"}
    async with setup.http.post(f"{url}/metrics", json=body, headers=headers) as answer:
        assert answer.status == 500
    with pytest.raises(OSError, match="No space left"):
        await asyncio.wait_for(broken.broken(), 60)
    await broken.stop()


async def test_traces_of_the_present_trainer_are_handed_on_and_those_of_a_dead_one_are_not() -> None:
    traces: list[Trace] = []
    server = FeedServer(Queue(), Reports(), on_trace=traces.append)
    url = await server.start()
    await server.begin(2)
    ranks = Feed(url, server.token)
    for incarnation in (1, 2):
        await asyncio.to_thread(ranks.trace, 7, incarnation, 3, b"bytes")
    await asyncio.to_thread(ranks.trace, 8, 2, 3, bytes(MAX_TRACE_BYTES + 1))
    ranks.close()
    await server.stop()
    assert traces == [Trace(2, 7, 3, b"bytes")]
