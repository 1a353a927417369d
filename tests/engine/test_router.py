"""Several engines as one: affinity, failover from the tokens so far, publishing in order, fencing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from agentrl.engine.client import EngineClient
from agentrl.engine.router import Router
from agentrl.errors import DeadlineExceeded, EngineError
from agentrl.testing.scripted_server import Fault, ScriptedServer
from agentrl.types import Version
from tests.engine.kit import own_port, request, until

V11 = Version(1, 1)


def _counting(prompt: Sequence[int]) -> list[int]:
    return list(range(prompt[-1] + 1, 60))


@asynccontextmanager
async def _fleet(n: int, **settings: float) -> AsyncIterator[tuple[Router, list[ScriptedServer]]]:
    """Engines that are asked often, and given up by patience only where a test says so."""
    servers = [ScriptedServer(_counting, **settings) for _ in range(n)]  # type: ignore[arg-type]
    with ExitStack() as ports:
        for server in servers:
            await server.start(ports.enter_context(own_port()))
        router = Router([EngineClient(s.url) for s in servers], check_every=0.05, max_misses=2)
        try:
            yield router, servers
        finally:
            await router.close()
            for server in servers:
                await server.stop()


def _made(servers: Sequence[ScriptedServer]) -> list[int]:
    """How many tokens each live request has."""
    return [len(state.tokens) for server in servers for state in server.running.values()]


def _asked(server: ScriptedServer) -> list[dict[str, object]]:
    return [body for path, body in server.calls if path == "/generate"]


async def test_sessions_stick_and_load_spreads() -> None:
    async with _fleet(2) as (router, servers):
        for turn in range(3):
            await asyncio.gather(*(router.generate(request(f"{s}-{turn}", [9], session=f"s{s}")) for s in range(8)))
        by_session = [{str(b["rid"]).split("-")[0] for b in _asked(s)} for s in servers]
    assert [len(sessions) for sessions in by_session] == [4, 4]
    assert not by_session[0] & by_session[1]


async def test_a_dying_engine_loses_nothing() -> None:
    async with _fleet(2, token_delay=0.001) as (router, servers):
        for server in servers:
            server.holds_at = 30
        tasks = [
            asyncio.create_task(router.generate(request(f"r{i}", [9], max_tokens=45, session=f"s{i}")))
            for i in range(8)
        ]
        await until(lambda: _made(servers) == [30] * 8)
        await servers[0].stop()
        servers[1].holds_at = None
        done = await asyncio.gather(*tasks)
        moved = [b for b in _asked(servers[1]) if "~" in str(b["rid"])]
        assert router.fenced.keys() == {servers[0].url}
    assert all(c.tokens.tolist() == list(range(10, 55)) for c in done)
    assert len(moved) == 4
    assert all(len(b["input_ids"]) > 1 for b in moved), "they go on from the tokens so far"  # type: ignore[arg-type]


async def test_a_hanging_engine_is_fenced_and_its_requests_move() -> None:
    async with _fleet(2) as (router, servers):
        servers[0].faults.append(Fault("hang", after=3))
        task = asyncio.create_task(router.generate(request("r", [9], max_tokens=6)))
        await until(lambda: _made(servers) == [3])
        servers[0].info_hangs = True
        router._seats[0].client._control_timeout = 0.1
        await until(lambda: servers[0].unanswered > 1)
        done = await task
        assert servers[0].url in router.fenced
    assert done.tokens.tolist() == list(range(10, 16))


async def test_a_request_moves_also_where_nobody_answers_its_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.client._ABORT_SECONDS", 0.1)
    async with _fleet(2, control_delay=60.0) as (router, servers):
        servers[0].faults.append(Fault("reset", after=3))
        done = await router.generate(request("r", [9], max_tokens=6))
        assert [body["rid"] for body in _asked(servers[1])] == ["r~1."]
    assert done.tokens.tolist() == list(range(10, 16))


async def test_an_engine_comes_back_while_another_one_is_lost() -> None:
    async with _fleet(2) as (router, servers):
        router._seats[0].client._control_timeout = 1e9
        await router.generate(request("r", [9]))
        servers[0].info_hangs = True
        await until(lambda: servers[0].unanswered)  # it is being asked
        router.fence(servers[1].url, "it did not fetch in time")
        router.fence(servers[0].url, "its host is gone")
        await until(lambda: router.serving == (servers[1].url,))


async def test_a_poison_request_does_not_take_every_engine() -> None:
    async with _fleet(4) as (router, servers):
        for server in servers:
            server.faults += [Fault("reset")] * 10
        with pytest.raises(EngineError, match="may be the cause"):
            await router.generate(request("poison", [9]))
        assert sum(len(_asked(s)) for s in servers) == 3


async def test_no_engine_at_all_ends_at_the_deadline() -> None:
    async with _fleet(1) as (router, servers):
        await servers[0].stop()
        waits = asyncio.create_task(router.generate(request("waits", [9])))
        await until(lambda: router.fenced)
        with pytest.raises(DeadlineExceeded, match="no engine served"):
            await router.generate(request("r", [9], seconds=0.1))
        assert not waits.done()
        waits.cancel()
        await asyncio.wait((waits,))


async def test_publish_updates_only_paused_engines_and_resumes_all() -> None:
    async with _fleet(3, control_delay=0.02, token_delay=0.01) as (router, servers):
        for server in servers:
            server.holds_at = 30
        tasks = [
            asyncio.create_task(router.generate(request(f"r{i}", [9], max_tokens=40, session=f"s{i}")))
            for i in range(9)
        ]
        await until(lambda: len(made := _made(servers)) == 9 and min(made) > 2)
        report = await router.publish("new", V11)
        for server in servers:
            server.holds_at = None
        done = await asyncio.gather(*tasks)
        for server in servers:
            controls = [path for path, _ in server.calls if path.startswith(("/pause", "/update_weights", "/continue"))]
            assert controls == [
                "/pause_generation",
                "/pause_generation done",
                "/update_weights_from_disk",
                "/update_weights_from_disk done",
                "/continue_generation",
                "/continue_generation done",
            ]
        assert len(set(map(str, (await router.checksums()).values()))) == 1
    assert sorted(report.updated) == sorted(s.url for s in servers)
    assert all([s.version for s in c.spans] == [Version(1, 0), V11] for c in done)


async def test_engines_that_swap_between_two_tokens_are_not_paused() -> None:
    async with _fleet(2, control_delay=0.02, token_delay=0.01) as (_, servers):
        for server in servers:
            server.holds_at = 30
        clients = [EngineClient(s.url, hot_swap=s is servers[0]) for s in servers]
        router = Router(clients)
        try:
            tasks = [
                asyncio.create_task(router.generate(request(f"r{i}", [9], max_tokens=40, session=f"s{i}")))
                for i in range(6)
            ]
            await until(lambda: len(made := _made(servers)) == 6 and min(made) > 2)
            report = await router.publish("new", V11)
            for server in servers:
                server.holds_at = None
            done = await asyncio.gather(*tasks)
        finally:
            await router.close()
        paused = [any(path == "/pause_generation" for path, _ in s.calls) for s in servers]
    assert paused == [False, True]
    assert sorted(report.updated) == sorted(s.url for s in servers)
    assert all([s.version for s in c.spans] == [Version(1, 0), V11] for c in done)


async def test_a_publish_that_all_refuse_leaves_the_old_version_serving() -> None:
    async with _fleet(2) as (router, servers):
        for server in servers:
            server.update_answers.append((400, "no such folder"))
        with pytest.raises(EngineError, match="no such folder"):
            await router.publish("nowhere", V11)
        assert router.fenced == {}
        done = await router.generate(request("r", [9], max_tokens=2))
    assert [s.version for s in done.spans] == [Version(1, 0)]


async def test_an_engine_that_refuses_alone_is_fenced_until_it_has_the_weights() -> None:
    async with _fleet(2) as (router, servers):
        servers[0].update_answers.append((400, "disk error"))
        report = await router.publish("new", V11)
        assert report.failed.keys() == {servers[0].url}
        await until(lambda: not router.fenced)
        assert [s.version for s in servers] == ["1.1", "1.1"]


async def test_publishing_under_random_delays_never_blocks_and_never_overtakes_the_pause() -> None:
    rng = random.Random(0)
    async with _fleet(2, token_delay=0.001) as (router, servers):
        for number in range(1, 26):
            for server in servers:
                server.control_delay = rng.random() * 0.004
            work = [router.generate(request(f"{number}-{i}", [9], max_tokens=5)) for i in range(4)]
            async with asyncio.timeout(60):
                await asyncio.gather(router.publish(f"w{number}", Version(1, number)), *work)
        for server in servers:
            paused = False
            for path, _ in server.calls:
                paused = {"/pause_generation done": True, "/continue_generation": False}.get(path, paused)
                assert path != "/update_weights_from_disk" or paused


async def test_a_later_engine_has_the_current_weights_before_it_serves(tmp_path: Path) -> None:
    async with _fleet(1) as (router, _), ScriptedServer(_counting) as late, ScriptedServer(_counting) as wrong:
        await router.publish(tmp_path, V11)
        await router.add(EngineClient(late.url))
        assert late.calls[0][0] == "/continue_generation"
        assert late.calls[2][0] == "/update_weights_from_disk"
        assert late.version == "1.1"
        wrong.version = "1.1"  # the right label on other weights
        stray = EngineClient(wrong.url)
        with pytest.raises(EngineError, match="other weights"):
            await router.add(stray)
        await stray.close()


async def test_a_restarted_engine_comes_back_with_the_current_weights() -> None:
    async with _fleet(2) as (router, servers):
        await router.publish("new", V11)
        port = int(servers[0].url.rsplit(":", 1)[1])
        await servers[0].stop()
        await until(lambda: bool(router.fenced))
        again = ScriptedServer(_counting)
        await again.start(port)
        await until(lambda: not router.fenced)
        assert (again.version, again.checksum) == ("1.1", "new")
        await again.stop()


async def test_a_lone_engine_that_was_restarted_proves_its_weights_before_it_serves(tmp_path: Path) -> None:
    async with _fleet(1) as (router, (server,)):
        await router.publish(tmp_path, V11)
        await until(lambda: router._noted is not None)
        await server.stop()
        await until(lambda: router.fenced)
        later = ScriptedServer(_counting, version="0.0")
        later.checksum_of = lambda _: "half a file"
        await later.start()
        client = EngineClient(later.url)
        try:
            with pytest.raises(EngineError, match=r"other weights than those that served 1\.1: \['0/w'\]"):
                await router.add(client)
            assert router.serving == () or later.url not in router.serving
            assert _asked(later) == []
            later.checksum_of = str
            later.version = "0.0"  # it is started once more, from the base model
            await router.add(client)
            await router.generate(request("r", [9], session="s"))
            assert len(_asked(later)) == 1
        finally:
            await later.stop()


async def test_an_engine_that_vouches_for_another_and_is_lost_holds_nobody_up(tmp_path: Path) -> None:
    async with _fleet(1) as (router, (server,)), ScriptedServer(_counting) as late:
        await router.publish(tmp_path, V11)
        await until(lambda: router._noted is not None)
        router._seats[0].client._load_timeout = 1e9
        server.sums_hang = True
        before = len(server.calls)
        joining = asyncio.create_task(router.add(EngineClient(late.url)))
        await until(lambda: "/weights_checker done" in [path for path, _ in server.calls[before:]])
        server.info_hangs = True
        router.fence(server.url, "its host is gone")
        async with asyncio.timeout(60):
            await joining
            await router.publish("newer", Version(1, 2))
        assert router.serving == (late.url,)


async def test_an_engine_that_goes_while_it_comes_back_holds_nobody_up(tmp_path: Path) -> None:
    async with _fleet(2) as (router, servers):
        await router.publish(tmp_path, V11)
        router._seats[1].client._load_timeout = 1e9
        servers[1].sums_hang = True
        router.fence(servers[1].url, "no answer")
        before = len(servers[1].calls)
        await until(lambda: "/weights_checker done" in [path for path, _ in servers[1].calls[before:]])
        async with asyncio.timeout(60):
            await router.remove(servers[1].url)
            await router.publish("newer", Version(1, 2))
        assert router.serving == (servers[0].url,)
