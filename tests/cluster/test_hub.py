"""Leases: who is heard stays, who is not is lost for good, and who does not belong is sent away."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentrl import __version__
from agentrl.cluster.beats import Member
from agentrl.cluster.files import open_http
from agentrl.cluster.hub import Hub
from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.worker import Worker, WorkerOptions
from agentrl.errors import ConfigError

TOKEN = "a-token-for-the-tests-only"


async def until(what: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + 60
    while not what():
        assert asyncio.get_running_loop().time() < end, "it did not come to that in time"
        await asyncio.sleep(0.02)


class Setup:
    def __init__(self, hub: Hub, notes: list[str]) -> None:
        self.hub, self.notes, self.beats = hub, notes, 0

    async def post(self, path: str, body: dict[str, Any], token: str = TOKEN) -> tuple[int, dict[str, Any]]:
        url = f"http://127.0.0.1:{self.beats}" if path == "/beat" else f"{self.hub.url}/cluster"
        async with open_http(token) as session, session.post(f"{url}{path}", json=body) as response:
            return response.status, await response.json()

    async def join(self, role: str = "engine", **other: Any) -> tuple[int, dict[str, Any]]:
        join = {"role": role, "address": "http://127.0.0.1:9", "host": "127.0.0.1", "name": "x", "version": __version__}
        status, body = await self.post("/join", {**join, **other})
        self.beats = body.get("beats", self.beats)
        return status, body

    def member(self, joined: dict[str, Any]) -> Member:
        return next(m for m in self.hub.members("engine") if m.lease == joined["lease"])


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    notes: list[str] = []
    # Nobody is lost by a machine that stands still: who is to be silent is made to look so.
    options = ClusterOptions(kind="external", port=0, lost_seconds=60.0)
    hub = Hub(options, TOKEN, run="r", note=notes.append, probe_dir=tmp_path)
    await hub.start({})
    watching = asyncio.create_task(hub.run())
    yield Setup(hub, notes)
    watching.cancel()
    await hub.stop()


async def test_a_silent_worker_is_lost_and_its_lease_never_comes_back(setup: Setup) -> None:
    (_, silent), (_, other) = await setup.join(), await setup.join()
    status, orders = await setup.post("/beat", {"lease": silent["lease"]})
    assert (status, orders) == (200, {"task": None})
    setup.member(other).heard = before = setup.member(other).heard - 30
    assert (await setup.post("/beat", {"lease": other["lease"]}))[0] == 200
    assert setup.member(other).heard > before + 29, "a beat is a sign of life"
    setup.member(silent).heard -= 61
    await until(lambda: len(setup.hub.members("engine")) == 1)
    assert [m.lease for m in setup.hub.members("engine")] == [other["lease"]]
    assert any("is lost: not heard of for" in note for note in setup.notes)
    status, body = await setup.post("/beat", {"lease": silent["lease"]})
    assert status == 410
    assert "join again" in body["error"]


async def test_a_busy_conductor_loses_nobody_who_beats_and_hears_of_who_does_not(setup: Setup) -> None:
    (_, alive), (_, silent) = await setup.join(), await setup.join()
    beating, mute = setup.member(alive), setup.member(silent)
    over, answers = threading.Event(), []

    def beat_on() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        while not over.wait(0.2):
            connection = http.client.HTTPConnection("127.0.0.1", setup.beats, timeout=60)
            connection.request("POST", "/beat", json.dumps({"lease": alive["lease"]}), headers)
            answers.append(connection.getresponse().status)
            connection.close()

    thread = threading.Thread(target=beat_on)
    thread.start()
    end = time.monotonic() + 60
    # Nothing of the conductor's own loop runs here.
    beating.heard, mute.heard = (before := beating.heard - 30), mute.heard - 61
    while beating.heard < before + 29 or len(answers) < 3 or not mute.over:
        assert time.monotonic() < end, "its beats were not heard, or nobody missed the other's"
        sum(range(1000))
    assert len(setup.hub.members("engine")) == 2, "the loop that has been busy has yet to be told"
    await until(lambda: len(setup.hub.members("engine")) == 1)
    over.set()
    await asyncio.to_thread(thread.join)
    assert answers.count(200) == len(answers)
    assert [member.lease for member in setup.hub.members("engine")] == [alive["lease"]]
    assert (await setup.post("/beat", {"lease": silent["lease"]}))[0] == 410


async def test_who_leaves_is_gone_at_once(setup: Setup) -> None:
    _, joined = await setup.join()
    (member,) = setup.hub.members("engine")
    await setup.post("/leave", {"lease": joined["lease"]})
    assert setup.hub.members("engine") == []
    assert member.gone == "it left"


async def test_who_does_not_belong_is_told_why(setup: Setup) -> None:
    status, body = await setup.join(version="0.0.1")
    assert (status, "agentrl 0.0.1" in body["error"]) == (409, True)
    status, body = await setup.join("trainer", probe="another disk's")
    assert status == 409
    assert "cluster.shared_disk" in body["error"]
    assert (await setup.join("engine", probe=None))[0] == 200, "an engine fetches what it loads"
    assert (await setup.post("/join", {}, token="wrong"))[0] == 401
    assert (await setup.post("/join", {"role": "cook"}))[0] == 400


async def test_the_probe_is_read_where_the_disk_is_shared(setup: Setup, tmp_path: Path) -> None:
    async with open_http(TOKEN) as session, session.get(f"{setup.hub.url}/cluster/") as response:
        welcome = await response.json()
    assert welcome["probe"] == str(tmp_path / ".shared")
    assert (await setup.join("trainer", probe=(tmp_path / ".shared").read_text()))[0] == 200


async def test_generations_and_leases_are_never_used_twice(setup: Setup) -> None:
    leases = {(await setup.join())[1]["lease"] for _ in range(5)}
    assert len(leases) == len({setup.hub.generation() for _ in range(5)}) == 5


async def test_a_worker_joins_beats_and_leaves_with_the_run(setup: Setup, tmp_path: Path) -> None:
    options = WorkerOptions("trainer", setup.hub.url, TOKEN, slots=2, name="mine")
    worker = asyncio.create_task(Worker(options, tmp_path / "scratch").run())
    await until(lambda: any(member.beat.port for member in setup.hub.members("trainer")))
    there = setup.hub.members("trainer")
    assert (there[0].join.host, there[0].join.slots, there[0].join.name) == ("127.0.0.1", 2, "mine")
    for path, method in (("/stop", "post"), ("/engine/model_info", "get"), ("/files/x", "get"), ("/fetch", "post")):
        async with (
            aiohttp.ClientSession() as stranger,
            stranger.request(method, there[0].join.address + path) as answer,
        ):
            assert answer.status == 401, f"{path} without the token"
    await setup.hub.stop()
    assert await asyncio.wait_for(worker, 60) == 0


async def test_a_worker_with_another_token_says_so(setup: Setup, tmp_path: Path) -> None:
    options = WorkerOptions("engine", setup.hub.url, "another-token-than-theirs")
    with pytest.raises(ConfigError, match="refused the token"):
        await Worker(options, tmp_path / "scratch").run()


async def test_a_worker_without_a_conductor_gives_up_in_words(tmp_path: Path) -> None:
    options = WorkerOptions("engine", "http://127.0.0.1:9", TOKEN, patience=0.1)
    with pytest.raises(ConfigError, match="no conductor at"):
        await Worker(options, tmp_path).run()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "local", "port": 7700}, "port has no effect with cluster.kind = 'local'"),
        ({"kind": "external", "ray_address": "auto"}, "ray_address has no effect"),
        ({"kind": "external", "host": "0.0.0.0"}, "public interfaces"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ClusterOptions.model_validate(settings)
