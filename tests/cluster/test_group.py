"""A trainer's group whose host says nothing any more: nothing waits for it, and nothing of it is made whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from agentrl import __version__
from agentrl.cluster.beats import Member, MemberGone, while_there
from agentrl.cluster.files import TransferFailed, open_http
from agentrl.cluster.group import RemoteGroup
from agentrl.cluster.hub import Hub
from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.protocol import Join
from agentrl.conductor.feed import CommitRequest
from agentrl.train.options import AlgorithmOptions, TrainerJob, TrainOptions

TOKEN = "a-token-for-the-tests-only"


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """A host that takes requests and never answers."""

    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", never)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_nobody_waits_for_a_host_that_is_gone() -> None:
    join = Join(role="trainer", address="http://x", host="x", name="x", version=__version__)
    member = Member("lease", join)
    waiting = asyncio.ensure_future(while_there(member, asyncio.sleep(3600)))
    await asyncio.sleep(0)
    member.gone = "not heard of"
    with pytest.raises(MemberGone, match="trainer worker x is lost: not heard of"):
        await asyncio.wait_for(waiting, 5)
    assert await while_there(Member("lease", join), asyncio.sleep(0, "done")) == "done"


@pytest.mark.parametrize("how", ["lost", "stopped"])
async def test_a_checkpoint_of_a_group_that_is_over_is_not_made_whole(how: str, silent: str, tmp_path: Path) -> None:
    hub = Hub(ClusterOptions(kind="external", port=0, lost_seconds=2.0), TOKEN, run="r", note=print)
    await hub.start({})
    join = {"role": "trainer", "address": silent, "host": "127.0.0.1", "name": "x", "version": __version__}
    async with open_http(TOKEN) as http:
        async with http.post(f"{hub.url}/cluster/join", json=join) as response:
            joined = await response.json()
        beat = {"lease": joined["lease"], "port": 1}
        async with http.post(f"http://127.0.0.1:{joined['beats']}/beat", json=beat) as response:
            assert response.status == 200
    job = TrainerJob(
        run="r", train=TrainOptions(), algorithm=AlgorithmOptions(), model_dir=tmp_path, feed_url="http://x",
        weights_dir=tmp_path / "w", checkpoints_dir=tmp_path / "c",
    )  # fmt: skip
    group = RemoteGroup(job, "token", hub, silent_seconds=60.0, keep_log=lambda text: tmp_path)
    ended = asyncio.ensure_future(group.ended())
    while group.lead is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    asked = CommitRequest(step=3, version="1.3", content={}, keep=1)
    commit = asyncio.ensure_future(group.commit(asked, tmp_path / "c"))
    await asyncio.sleep(0.1)
    if how == "lost":
        hub.lose(group.lead, "not heard of")
    else:
        await group.stop()
    with pytest.raises(MemberGone if how == "lost" else TransferFailed):
        await asyncio.wait_for(commit, 5)
    assert not list((tmp_path / "c").glob("step-*"))
    ended.cancel()
    hub.lose(group.lead, "the test is over")  # nobody says goodbye to a host that does not answer
    await hub.stop()
