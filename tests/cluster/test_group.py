"""A trainer's group whose host says nothing any more: nothing waits for it, and nothing of it is made whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web

from agentrl import __version__
from agentrl.cluster.beats import Member, MemberGone, while_there
from agentrl.cluster.files import Handler, Shelf, TransferFailed, open_http
from agentrl.cluster.group import RemoteGroup
from agentrl.cluster.hub import Hub
from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.protocol import Join, State
from agentrl.conductor.cause import Death
from agentrl.conductor.feed import CommitRequest, Phase
from agentrl.conductor.publish import WeightsLost
from agentrl.train.options import AlgorithmOptions, TrainerJob, TrainOptions

TOKEN = "a-token-for-the-tests-only"


class Silent(NamedTuple):
    """A host that takes requests and never answers."""

    url: str
    asked: asyncio.Event


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    asked = asyncio.Event()

    async def never(request: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.sleep(3600)
        raise AssertionError

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", never)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Silent(f"http://127.0.0.1:{runner.addresses[0][1]}", asked)
    await runner.cleanup()


async def test_nobody_waits_for_a_host_that_is_gone() -> None:
    join = Join(role="trainer", address="http://x", host="x", name="x", version=__version__)
    member = Member("lease", join)
    waiting = asyncio.ensure_future(while_there(member, asyncio.sleep(3600)))
    await asyncio.sleep(0)
    member.gone = "not heard of"
    with pytest.raises(MemberGone, match="trainer worker x is lost: not heard of"):
        await asyncio.wait_for(waiting, 60)
    assert await while_there(Member("lease", join), asyncio.sleep(0, "done")) == "done"


@pytest.mark.parametrize("how", ["lost", "stopped"])
async def test_a_checkpoint_of_a_group_that_is_over_is_not_made_whole(how: str, silent: Silent, tmp_path: Path) -> None:
    async with _group(silent.url, tmp_path) as (hub, group, lead, _):
        asked = CommitRequest(step=3, version="1.3", content={}, keep=1)
        commit = asyncio.ensure_future(group.commit(asked, tmp_path / "c"))
        await asyncio.wait_for(silent.asked.wait(), 60)
        if how == "lost":
            hub.lose(lead, "not heard of")
        else:
            await group.stop()
        with pytest.raises(MemberGone if how == "lost" else TransferFailed):
            await asyncio.wait_for(commit, 60)
        assert not list((tmp_path / "c").glob("step-*"))


async def test_a_checkpoint_that_is_asked_for_as_its_group_ends_is_not_begun(silent: Silent, tmp_path: Path) -> None:
    """Its host is asked for nothing: nobody would end that any more."""
    async with _group(silent.url, tmp_path) as (_, group, _, _):
        commit = asyncio.ensure_future(
            group.commit(CommitRequest(step=3, version="1.3", content={}, keep=1), tmp_path / "c")
        )
        await group.stop()
        with pytest.raises(TransferFailed, match="is over"):
            await asyncio.wait_for(commit, 60)
    assert not silent.asked.is_set()


@pytest.mark.parametrize("how", ["broken once", "lost", "stopped"])
async def test_weights_are_passed_over_only_with_the_group_that_made_them(how: str, tmp_path: Path) -> None:
    """Else the trainer would wait for a batch that only the publish of these weights makes room for."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model.safetensors").write_bytes(b"weights")
    shelf, asked = Shelf(), list[str]()
    shelf.put("weights-1.7", tmp_path / "made")

    @web.middleware
    async def broken(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked.append(request.path)
        if request.transport is not None and (how != "broken once" or len(asked) == 1):
            request.transport.abort()
        return await handler(request)

    files = web.Application(middlewares=[broken])
    files.add_routes(shelf.routes())
    app = web.Application()
    app.add_subapp("/files", files)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with _group(f"http://127.0.0.1:{runner.addresses[0][1]}", tmp_path) as (hub, group, lead, _):
        coming = asyncio.ensure_future(group.fetch_weights("weights-1.7", tmp_path / "here"))
        if how == "broken once":
            assert list(await asyncio.wait_for(coming, 100)) == ["model.safetensors"]
            assert (tmp_path / "here" / "model.safetensors").read_bytes() == b"weights"
        else:
            while len(asked) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert not coming.done()
            if how == "lost":
                hub.lose(lead, "not heard of")
            else:
                await group.stop()
            with pytest.raises(WeightsLost):
                await asyncio.wait_for(coming, 60)
    await runner.cleanup()


@pytest.mark.parametrize("state", ["preparing", "running"])
async def test_a_group_whose_ranks_wait_for_each_other_ends(state: State, tmp_path: Path) -> None:
    """But not for what is heard while a host still fetches its model, however long that takes."""
    async with _group("http://127.0.0.1:9", tmp_path, ranks=2) as (_, group, lead, ended):
        assert lead.task is not None
        lead.beat = lead.beat.model_copy(update={"generation": lead.task.generation, "state": state})
        for rank in range(2):
            group.heard(Phase(rank=rank, phase="load", step=0, still=31.0 + rank, where=f"wait (place.py:{rank})"))
        if state == "preparing":
            await asyncio.sleep(0.5)
            assert not ended.done()
        else:
            death = await asyncio.wait_for(ended, 60)
            assert death is not None
            assert not death.own
            assert death.text.startswith("all 2 trainer ranks have stood still in 'load' for 31 s")


@asynccontextmanager
async def _group(
    address: str, place: Path, ranks: int = 1
) -> AsyncIterator[tuple[Hub, RemoteGroup, Member, asyncio.Future[Death | None]]]:
    """A group on a host that only serves what the test says."""
    hub = Hub(ClusterOptions(kind="external", port=0, lost_seconds=60.0), TOKEN, run="r", note=print)
    await hub.start({})
    join = {"role": "trainer", "address": address, "host": "127.0.0.1", "name": "x", "version": __version__}
    async with open_http(TOKEN) as http:
        async with http.post(f"{hub.url}/cluster/join", json={**join, "slots": ranks}) as response:
            joined = await response.json()
        beat = {"lease": joined["lease"], "port": 1}
        async with http.post(f"http://127.0.0.1:{joined['beats']}/beat", json=beat) as response:
            assert response.status == 200
    job = TrainerJob(
        run="r", train=TrainOptions(ranks=ranks), algorithm=AlgorithmOptions(), model_dir=place / "model", feed_url="http://x",
        weights_dir=place / "w", checkpoints_dir=place / "c",
    )  # fmt: skip
    group = RemoteGroup(job, "token", hub, silent_seconds=60.0, keep_log=lambda text: place)
    ended = asyncio.ensure_future(group.ended())
    while group.lead is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    lead = group.lead
    yield hub, group, lead, ended
    ended.cancel()
    hub.lose(lead, "the test is over")  # nobody says goodbye to a host that does not answer
    await hub.stop()
