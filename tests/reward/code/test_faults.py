"""Faults of the machine while answers are graded: no verdict, never a reward of 0, and grading goes on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.envs.code import Code
from agentrl.errors import InfrastructureError, SandboxLost
from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.task import parse_task
from agentrl.reward.code.verdict import Status
from agentrl.sandbox import SandboxOptions, open_sandbox
from agentrl.sandbox.owner import owner_label
from tests.conductor.kit import finished, lines, make_place, start, wait_for
from tests.reward.code.conftest import PATIENT
from tests.sandbox.kinds import (
    BOUNDARIES,
    DOCKER,
    containers,
    eventually,
    long_sleep,
    needs_bwrap,
    nothing_left,
    pool_of,
    running,
    traces,
)
from tests.sandbox.test_faults import an_engine

ONE = parse_task({"mode": "stdio", "tests": [{"stdin": "", "stdout": "1"}], "time_limit_s": 600})
SLOW = "import time\ntime.sleep(1.5)\nprint(1)"
# The SDK's transport leaves a socket to the collector when an engine refuses the connection.
sockets_are_left = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_a_program_that_fills_its_disk_has_a_verdict_and_the_next_one_too(kind: str) -> None:
    async with pool_of(kind, disk_mb=2) as pool:
        grader = CodeReward(pool, PATIENT)
        full = await grader.grade_program("open('x', 'wb').write(bytes(5 << 20))\nprint(1)", ONE)
        assert (full.status, full.reward) == (Status.RUNTIME_ERROR, 0.0), full
        assert (await grader.grade_program("print(1)", ONE)).reward == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_two_hundred_at_once_each_get_their_own_verdict(kind: str) -> None:
    tasks = [parse_task({"mode": "stdio", "tests": [{"stdin": f"{n}\n", "stdout": f"{n}\n"}]}) for n in range(200)]
    with nothing_left():
        async with pool_of(kind) as pool:
            grader = CodeReward(pool, PATIENT)
            programs = [f"print(int(input()) + {n % 3})" for n in range(200)]
            found = await asyncio.gather(*map(grader.grade_program, programs, tasks))
    assert [verdict.reward for verdict in found] == [float(n % 3 == 0) for n in range(200)]


@pytest.mark.parametrize("kind", [DOCKER])
async def test_a_container_removed_while_it_grades(kind: str) -> None:
    import docker

    client = docker.from_env()
    asleep = long_sleep()
    program = f"import subprocess\nsubprocess.run({asleep})\nprint(1)"

    async def remove() -> None:
        """The container in which it runs."""
        await eventually(lambda: bool(running(*asleep)))
        for name in containers():
            client.containers.get(name).remove(force=True)
        await eventually(lambda: not running(*asleep))

    with nothing_left():
        async with pool_of(kind, slots=1) as pool:
            grader = CodeReward(pool, PATIENT)
            once = asyncio.create_task(grader.grade_program(program, ONE))
            await remove()
            await eventually(lambda: bool(running(*asleep)))
            for process in running(*asleep):
                os.kill(int(process.name), signal.SIGKILL)  # and it goes on
            assert (await once).status is Status.PASSED
        async with pool_of(kind, slots=1) as pool:
            grader = CodeReward(pool, PATIENT)
            twice = asyncio.create_task(grader.grade_program(program, ONE))
            await remove()
            await remove()
            verdict = await twice
            assert (verdict.status, verdict.reward, verdict.score().value) == (Status.INFRA_ERROR, None, None)
            assert (await grader.grade_program("print(1)", ONE)).reward == 1.0
    client.close()


@sockets_are_left
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [DOCKER])
async def test_an_engine_killed_while_it_grades(kind: str, tmp_path: Path) -> None:
    home = tmp_path / "d"
    with an_engine(home) as engine:
        url = engine()
        async with open_sandbox(SandboxOptions(kind=kind, slots=1, docker_url=url)) as pool:
            await pool.warm()
            grader, asleep = CodeReward(pool, PATIENT), long_sleep()
            grading = asyncio.create_task(grader.grade_program(f"import subprocess\nsubprocess.run({asleep})", ONE))
            await eventually(lambda: bool(running(*asleep)))
            os.kill(int((home / "pid").read_text()), signal.SIGKILL)
            verdict = await grading
            assert (verdict.status, verdict.reward) == (Status.INFRA_ERROR, None), verdict
            assert "is the engine up" in verdict.detail
            engine()
            assert (await grader.grade_program("print(1)", ONE)).reward == 1.0
    gc.collect()  # that socket, while the warning is ignored


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """Where an engine keeps images: 16 MiB. The engine's stop unmounts it."""
    data = tmp_path / "d" / "data"
    data.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", data], check=True)
    return data


@sockets_are_left
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("kind", [DOCKER])
async def test_an_engine_whose_disk_is_full(kind: str, small_disk: Path) -> None:
    with an_engine(small_disk.parent) as engine:
        env = Code(
            {"question": "?", "mode": "stdio", "tests": [{"stdin": "", "stdout": "1"}]},
            sandbox={"kind": kind, "slots": 1, "docker_url": engine()},
        )
        with pytest.raises(SandboxLost, match="disk full") as caught:
            await env.reset(seed=0)
        assert isinstance(caught.value, InfrastructureError)
        await env.close()
    gc.collect()


GRADES = f'''
from agentrl.envs.code import Code

class Grades(Code):
    """Whatever the model says, a program of two seconds is handed in."""
    async def step(self, action):
        return await super().step({{"role": "assistant", "content": {SLOW!r}}})
    @classmethod
    def rows(cls, split, seed):
        row = {{"question": "?", "mode": "stdio", "tests": [{{"stdin": "", "stdout": "1"}}]}}
        return (dict(row) for _ in range(40))
'''


@needs_bwrap
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_conductor_killed_while_it_grades(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    (place / "env.py").write_text(GRADES)
    settings = ("env.path=env.py:Grades", "env.args.public=0", "rollout.max_tokens=4")
    command = ("rollout", "run.toml", "--groups", "4", *settings)
    killed = start(place, *command)
    label = owner_label(killed.pid)
    wait_for(lambda: bool(traces(label)["processes"]), killed)  # a program that it grades runs
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    wait_until(lambda: not traces(label)["processes"])
    assert not traces(label)["mounts"]
    code, said = finished(start(place, *command, "--resume"), 300)
    assert code == 0, said
    assert not any(traces(label).values()), traces(label)
    (told,) = lines(place / "runs/r", "rollout")
    assert (told["groups"], told["reward_mean"]) == (4, 1.0), said


def wait_until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)
