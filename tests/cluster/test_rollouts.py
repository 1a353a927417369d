"""Episodes in other processes: what goes there and comes back, and what becomes of them when a worker is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agentrl import __version__
from agentrl.cluster.files import open_http
from agentrl.cluster.hub import Hub
from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.play import play
from agentrl.cluster.protocol import Source
from agentrl.cluster.rollouts import Job, PlaySpec, Rollouts, Work, check_rows, outcome_bytes, outcome_from
from agentrl.errors import DataError, EngineLost, SandboxLost
from agentrl.rollout.episode import EpisodeSpec, Outcome
from agentrl.rollout.player import Sampling
from agentrl.types import Context, Episode, Sampled, Segment, Stop, Trajectory, Turn, Version
from tests.conductor.kit import finished, lines, make_place, start, wait_for

TOKEN = "a-token-for-the-tests-only"
SAMPLING = Sampling("1", 7, True, 1.0)


def an_episode(spec: EpisodeSpec) -> Episode:
    trajectory = Trajectory(
        (
            Segment(np.array([1, 2]), None, Context()),
            Segment(np.array([3]), np.array([-0.5], np.float32), Sampled(Version(1, 3))),
        )
    )
    return Episode(
        group=spec.group,
        sample=spec.sample,
        attempt=spec.attempt,
        seed=spec.seed,
        row=spec.row,
        messages=({"role": "user", "content": "hi"},),
        turns=(Turn(0, 0, 3, 1.0, parts={"a": 0.5}),),
        trajectories=(trajectory,),
        stop=Stop.FINISHED,
        metrics={"retries": 2.0},
    )


def a_spec(group: int = 0) -> EpisodeSpec:
    return EpisodeSpec(group, 1, 2, 3, {"word": "x", "n": 1})


class Cluster:
    """The conductor's side, and rollout processes that the test plays by hand over HTTP."""

    def __init__(self, hub: Hub, rollouts: Rollouts, engines: list[str]) -> None:
        self.hub, self.rollouts, self.engines = hub, rollouts, engines
        self.seen: list[Episode] = []

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with open_http(TOKEN) as http, http.post(f"{self.hub.url}{path}", json=body) as response:
            return response.status, await response.json()

    async def worker(self) -> tuple[str, int]:
        """Join; the lease and the generation of its task."""
        join = {"role": "rollout", "address": "http://127.0.0.1:9", "host": "127.0.0.1", "name": "x"}
        _, joined = await self.post("/cluster/join", version=__version__, **join)
        beats = f"http://127.0.0.1:{joined['beats']}/beat"
        while True:
            async with open_http(TOKEN) as http, http.post(beats, json={"lease": joined["lease"]}) as response:
                orders = await response.json()
            if orders["task"] is not None:
                return joined["lease"], orders["task"]["generation"]
            await asyncio.sleep(0.02)

    async def next(
        self, place: tuple[str, int], got: int = 0, serial: int = -1, **more: dict[str, float]
    ) -> tuple[int, Any]:
        return await self.post("/rollout/next", lease=place[0], generation=place[1], serial=serial, got=got, **more)

    async def done(self, place: tuple[str, int], job: int, outcome: Outcome) -> int:
        body, error = outcome_bytes(outcome)
        query = {"lease": place[0], "generation": str(place[1]), "job": str(job)}
        url = f"{self.hub.url}/rollout/done"
        async with (
            open_http(TOKEN) as http,
            http.post(url, data=body, params=query, headers={"X-Error": error}) as response,
        ):
            return response.status


async def until(what: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + 60
    while not what():
        assert asyncio.get_running_loop().time() < end, "it did not come to that in time"
        await asyncio.sleep(0.02)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    hub = Hub(ClusterOptions(kind="external", port=0), TOKEN, run="r", note=lambda text: None)
    engines = ["http://127.0.0.1:1"]
    seen: list[Episode] = []
    rollouts = Rollouts(
        hub, {}, Source(name="m", urls=()), lambda: engines, nullcontext, seen.append, note=lambda text: None
    )
    await hub.start({"/rollout": rollouts.application()})
    running = asyncio.create_task(rollouts.run())
    found = Cluster(hub, rollouts, engines)
    found.seen = seen
    yield found
    running.cancel()
    await hub.stop()


async def test_an_episode_goes_out_and_comes_back(cluster: Cluster) -> None:
    acted: list[bool] = []
    playing = asyncio.create_task(cluster.rollouts.play(a_spec(), SAMPLING, on_act=lambda: acted.append(True)))
    place = await cluster.worker()
    assert acted == [], "nobody has it yet: no token of it can be sampled"
    _, work = await cluster.next(place)
    assert work["engines"] == ["http://127.0.0.1:1"]
    (job,) = work["jobs"]
    assert (job["group"], job["sample"], job["attempt"], job["seed"], job["row"]) == (0, 1, 2, 3, {"word": "x", "n": 1})
    assert (job["name"], job["sampling_seed"], job["training"]) == ("1", 7, True)
    assert acted == [True]
    _, again = await cluster.next(place)
    assert again == work, "an answer that was lost is given again"
    assert await cluster.done(place, job["id"], Outcome(an_episode(a_spec()))) == 200
    outcome = await playing
    assert outcome.episode == an_episode(a_spec())
    assert cluster.rollouts.retried == 2
    assert cluster.seen == [outcome.episode]
    assert await cluster.done(place, job["id"], Outcome(an_episode(a_spec()))) == 200, "said twice, counted once"


async def test_a_lost_worker_loses_only_what_it_ran_and_hands_in_nothing(cluster: Cluster) -> None:
    one = await cluster.worker()
    await cluster.next(one)
    playing = [asyncio.create_task(cluster.rollouts.play(a_spec(n), SAMPLING)) for n in range(3)]
    await asyncio.sleep(0)
    _, work = await cluster.next(one, got=1)
    jobs = {job["group"]: job["id"] for job in work["jobs"]}
    assert await cluster.done(one, jobs[0], Outcome(an_episode(a_spec(0)))) == 200
    cluster.hub.lose(cluster.hub.members("rollout")[0], "the test lost it")
    await until(lambda: cluster.rollouts.workers == 0)
    assert await cluster.done(one, jobs[1], Outcome(an_episode(a_spec(1)))) == 410
    assert (await cluster.next(one, got=2))[0] == 410
    other = await cluster.worker()
    _, work = await cluster.next(other)
    assert sorted(job["group"] for job in work["jobs"]) == [1, 2]
    for job in work["jobs"]:
        assert await cluster.done(other, job["id"], Outcome(an_episode(a_spec(job["group"])))) == 200
    assert [o.episode.group for o in await asyncio.gather(*playing)] == [0, 1, 2]


async def test_a_cancelled_episode_is_cancelled_there_too_and_work_is_shared(cluster: Cluster) -> None:
    places = [await cluster.worker() for _ in range(2)]
    for place in places:
        await cluster.next(place)
    playing = [asyncio.create_task(cluster.rollouts.play(a_spec(n), SAMPLING)) for n in range(4)]
    await asyncio.sleep(0)
    given = [(await cluster.next(place, got=1))[1]["jobs"] for place in places]
    assert [len(jobs) for jobs in given] == [2, 2]
    playing[given[0][0]["group"]].cancel()
    await asyncio.wait([playing[given[0][0]["group"]]])
    _, work = await cluster.next(places[0], got=2)
    assert work["cancel"] == [given[0][0]["id"]]
    for task in playing:
        task.cancel()
    await asyncio.wait(playing)


async def test_a_question_asked_again_while_the_first_one_is_held_loses_no_episode(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection broke, and the conductor did not hear of that."""
    monkeypatch.setattr("agentrl.cluster.rollouts.HOLD_SECONDS", 60.0)
    place = await cluster.worker()
    _, work = await cluster.next(place)
    asked = [asyncio.create_task(cluster.next(place, got=1, serial=work["serial"])) for _ in range(3)]
    (desk,) = cluster.rollouts._desks.values()
    await until(lambda: len(desk.wake._waiters) == 3)  # all three are held
    playing = [asyncio.create_task(cluster.rollouts.play(a_spec(n), SAMPLING)) for n in range(2)]
    answers = [(await task)[1] for task in asked]
    assert [job["group"] for job in answers[0]["jobs"]] == [0, 1]
    assert answers == [answers[0]] * 3
    for task in playing:
        task.cancel()
    await asyncio.wait(playing)


async def test_an_episode_that_came_damaged_is_had_again(cluster: Cluster) -> None:
    playing = asyncio.create_task(cluster.rollouts.play(a_spec(), SAMPLING))
    place = await cluster.worker()
    _, work = await cluster.next(place)
    query = {"lease": place[0], "generation": str(place[1]), "job": str(work["jobs"][0]["id"])}
    url = f"{cluster.hub.url}/rollout/done"
    async with open_http(TOKEN) as http, http.post(url, data=b"torn", params=query) as response:
        assert response.status == 500
    assert await cluster.done(place, work["jobs"][0]["id"], Outcome(an_episode(a_spec()))) == 200
    assert (await playing).episode == an_episode(a_spec())


async def test_engines_that_change_are_told(cluster: Cluster) -> None:
    place = await cluster.worker()
    _, work = await cluster.next(place)
    asking = asyncio.create_task(cluster.next(place, got=1, serial=work["serial"]))
    cluster.engines.append("http://127.0.0.1:2")
    _, work = await asking
    assert work["engines"] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


async def test_sandboxes_are_counted_wherever_they_are(cluster: Cluster) -> None:
    places = [await cluster.worker() for _ in range(2)]
    for place in places:
        figures = {'sandbox_slots{kind="docker"}': 4.0, 'sandbox_starts_total{kind="docker"}': 6.0}
        await cluster.next(place, sandboxes=figures)
    assert cluster.rollouts.sandboxes() == {name: 2 * value for name, value in figures.items()}
    cluster.hub.lose(cluster.hub.members("rollout")[0], "the test lost it")
    await until(lambda: cluster.rollouts.workers == 1)
    assert cluster.rollouts.sandboxes() == {
        'sandbox_slots{kind="docker"}': 4,
        'sandbox_starts_total{kind="docker"}': 12,
    }


def test_what_ended_an_episode_keeps_its_kind() -> None:
    lost = replace(an_episode(a_spec()), stop=Stop.SANDBOX_LOST, error="env.step raised SandboxLost: gone")
    body, name = outcome_bytes(Outcome(lost, SandboxLost("gone")))
    back = outcome_from(body, name, lost.row)
    assert back.episode == lost
    assert isinstance(back.error, SandboxLost)
    body, name = outcome_bytes(Outcome(lost, ZeroDivisionError("user code")))
    assert str(outcome_from(body, name, lost.row).error) == lost.error
    assert isinstance(outcome_from(body, "EngineLost", lost.row).error, EngineLost)


def test_rows_that_cannot_travel_are_named() -> None:
    check_rows([{"a": [1, "x", None]}])
    with pytest.raises(DataError, match="row 1 cannot go to a rollout worker"):
        check_rows([{"a": 1}, {"a": object()}])


async def test_a_process_that_cannot_hand_in_an_episode_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the conductor would wait for that episode as long as one may take."""
    monkeypatch.setattr("agentrl.cluster.play.PATIENCE_SECONDS", 0.1)
    place = make_place(tmp_path)
    (place / "env.py").write_text("import agentrl.env\n\nclass Bad(agentrl.env.Env):\n    pass\n")
    job = Job(
        id=1, group=0, sample=0, attempt=0, seed=1, row={}, name="1", sampling_seed=1, training=True, temperature=1.0
    )
    numbers = itertools.count(1)

    async def next_(request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        work = Work(number=(n := next(numbers)), jobs=(job,) if n == 1 else (), cancel=(), engines=(), serial=0)
        return web.json_response(work.model_dump())

    async def done(request: web.Request) -> web.Response:
        return web.Response(status=500)

    app = web.Application()
    app.add_routes([web.post("/rollout/next", next_), web.post("/rollout/done", done)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {"name": "r", "model": str(place / "model"), "env": {"path": f"{place}/env.py:Bad"}}
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    spec = PlaySpec(conductor=url, lease="x", generation=1, config=config, model=place / "model")
    with pytest.raises(EngineLost, match="does not answer /rollout/done"):
        await asyncio.wait_for(play(spec, TOKEN), 60)
    await runner.cleanup()


BOXED = """
from agentrl.reward.code.bench import shared_bench
from agentrl.sandbox import SandboxOptions

class Boxed(Bright):
    async def step(self, action):
        async with shared_bench(SandboxOptions(kind="subprocess", slots=2)) as bench, bench.boxes.box() as box:
            await box.exec(["true"])
        return await super().step(action)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollout_processes_on_this_machine_and_one_of_them_killed(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    (place / "env.py").write_text((place / "env.py").read_text() + BOXED)
    run = place / "runs" / "r"
    settings = ["env.path=env.py:Boxed", "train.steps=14", "eval.every=1000", "cluster.rollout_workers=2"]
    settings += ["env.args.gate=20"]  # the two of them get not through all, until they are let go
    process = start(place, "train", "run.toml", *settings)
    wait_for(lambda: len(lines(run, "step")) >= 2, process)
    programs = 'sandbox_programs_total{kind="subprocess",end="ok"}'
    wait_for(lambda: json.loads((run / "state.json").read_text())["gauges"].get(programs, 0) > 8, process)
    killed = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _plays(pid, process.pid)]
    os.kill(killed[0], signal.SIGKILL)
    (place / "go").touch()
    code, output = finished(process)
    assert code == 0, output
    steps = lines(run, "step")
    assert steps[-1]["step"] == 14
    assert all(s["staleness/max"] <= 4 for s in steps)
    assert steps[0]["behaviour/abs_log_weight_max"] < 1e-3
    assert sum(s.get("rollout/tokens_per_second", 0) for s in steps) > 0
    for index in range(2):
        assert "joined run 'r'" in (run / "logs" / f"rollout-{index}.log").read_text()
        assert (run / "logs" / f"rollout-{index}" / "play.log").exists(), "the process that it plays in has its own"


def _plays(pid: int, conductor: int) -> bool:
    """Whether it is a rollout process below this conductor."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        while pid > 1 and b"agentrl.cluster.play" in command and b"agentrl.child" not in command:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if pid == conductor:
                return True
    except OSError:
        pass
    return False
