"""Failures that users of other systems reported: cases/sandbox.jsonl, on every kind of box that is a boundary."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandbox import SandboxLost
from agentrl.sandboxes.docker import LABEL, Boxes, Frames
from tests.sandbox import test_faults as faults
from tests.sandbox.attacks import others
from tests.sandbox.kinds import (
    BOUNDARIES,
    DOCKER,
    DOCKER_IS_HERE,
    containers,
    eventually,
    long_sleep,
    needs_bwrap,
    nothing_left,
    pool_of,
    running,
)

LINES = (Path(__file__).parent.parent / "cases" / "sandbox.jsonl").read_text().splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
COVERED = {"H01", "H03", "H04", "H06", "H07", "H09", "H12", "H13", "H14", "H15", "H16", "H18", "H20"}


def test_every_case_has_a_test() -> None:
    assert set(CASES) == COVERED


def test_h04_no_frame_headers_in_the_output() -> None:
    raw, expected = bytes.fromhex(CASES["H04"]["input"]["raw_hex"]), CASES["H04"]["expected"]
    for step in range(1, len(raw) + 1):  # however the bytes arrive
        frames, found = Frames(), {1: b"", 2: b""}
        for start in range(0, len(raw), step):
            for stream, payload in frames.feed(raw[start : start + step]):
                found[stream] += payload
        assert found == {1: expected["stdout"].encode(), 2: expected["stderr"].encode()}


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_h06_bytes_that_are_no_text(kind: str) -> None:
    data = bytes.fromhex("".join(CASES["H06"]["input"]["chunks_hex"]))
    async with pool_of(kind) as pool, pool.box() as box:
        done = await box.exec(["cat"], stdin=data)
    assert done.stdout == data
    assert CASES["H06"]["expected"]["text_contains"] in done.stdout_text


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_plain_commands(kind: str) -> None:
    async with pool_of(kind) as pool, pool.box() as box:
        done = await box.exec(["sh", "-c", CASES["H03"]["input"]["cmd"]])
        assert (done.stdout, done.stderr, done.returncode) == (b"", b"", 0)
        done = await box.exec(["sh", "-c", CASES["H16"]["input"]["cmd"]])
        assert (done.returncode, done.ok) == (CASES["H16"]["expected"]["exit_code"], False)


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_h01_h14_a_timed_out_command_is_gone_and_the_next_one_runs(kind: str) -> None:
    given, expected = CASES["H01"]["input"], CASES["H01"]["expected"]
    async with pool_of(kind) as pool, pool.box() as box:
        done = await box.exec(["sh", "-c", given["cmd"]], timeout=given["timeout_s"])
        assert done.timed_out == expected["timed_out"]
        assert await others(box) == ""
        assert (await box.exec(["sleep", "999"], timeout=1)).timed_out
        assert (await box.exec(["echo", "ok"])).stdout.decode() == CASES["H14"]["expected"]["second"]["stdout"]


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_h15_a_flood_costs_the_caller_no_memory(kind: str) -> None:
    given, expected = CASES["H15"]["input"], CASES["H15"]["expected"]
    async with pool_of(kind, output_bytes=given["cap_bytes"]) as pool, pool.box() as box:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done = await box.exec([given["cmd"]], timeout=20 * given["timeout_s"])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert done.truncated
    assert 0 < len(done.stdout) <= expected["stdout_len_max"]
    assert grown < expected["client_rss_growth_mb_max"]


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_h18_killed_for_memory(kind: str) -> None:
    given, expected = CASES["H18"]["input"], CASES["H18"]["expected"]
    async with pool_of(kind, memory_mb=given["memory_mb"]) as pool, pool.box() as box:
        done = await box.exec(["sh", "-c", given["cmd"]], timeout=60)
        assert (done.returncode, done.oom) == (expected["exit_code"], expected["oom"])
        assert not done.ok


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_h12_a_program_that_ignores_the_polite_signal(kind: str) -> None:
    with nothing_left():
        async with pool_of(kind) as pool, pool.box() as box:
            # With a number by which it is found among all of this machine.
            entry = CASES["H12"]["input"]["entry"].replace("do ", f"do : {long_sleep()[1]}; ")
            program = asyncio.create_task(box.exec(["sh", "-c", entry], timeout=600))
            await eventually(lambda: any(map(_ignores_term, running(*shlex.split(entry)))))
            await box.close()
            with pytest.raises(SandboxLost):
                await program


def _ignores_term(process: Path) -> bool:
    try:
        ignored = re.search(r"SigIgn:\s+(\w+)", (process / "status").read_text())
    except OSError:
        return False
    return ignored is not None and bool(int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_bwrap
async def test_h13_a_long_silence() -> None:
    given = CASES["H13"]["input"]

    async def quiet(kind: str) -> None:
        async with pool_of(kind) as pool, pool.box() as box:
            done = await box.exec(["sh", "-c", given["cmd"]], timeout=5 * given["timeout_s"])
        assert (done.stdout.decode(), done.timed_out) == (CASES["H13"]["expected"]["stdout"], False)

    # Side by side: it takes 70 s.
    await asyncio.gather(*(quiet(kind) for kind in ("bubblewrap", "docker") if kind != "docker" or DOCKER_IS_HERE))


@pytest.mark.parametrize("kind", [DOCKER])
async def test_h07_owners_are_labelled_and_reaped(kind: str) -> None:
    await faults.test_a_killed_owner_leaves_nothing(kind)
    async with pool_of(kind) as pool, pool.box():
        import docker

        client = docker.from_env()
        assert client.containers.get(containers()[0]).labels[LABEL]
        client.close()


@pytest.mark.parametrize("kind", [DOCKER])
async def test_h09_a_cancelled_user_leaves_no_container(kind: str) -> None:
    program = long_sleep()
    async with pool_of(kind) as pool:

        async def use() -> None:
            async with pool.box() as box:
                await box.exec(program, timeout=600)

        stages: list[Callable[[], object]] = [lambda: pool.standing().starting, containers, lambda: running(*program)]
        for reached in stages:  # while the container is made, while it starts, and while the program runs
            user = asyncio.create_task(use())
            await eventually(lambda reached=reached: bool(reached()))  # type: ignore[misc]
            user.cancel()
            await asyncio.wait([user])
    assert containers() == []


@pytest.mark.parametrize("kind", [DOCKER])
async def test_h20_many_containers_close_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, call = CASES["H20"]["input"]["containers"], Boxes.call
    removing, most = 0, 0

    async def counted(self: Boxes, what: str, act: Callable[[], Any]) -> Any:
        nonlocal removing, most
        ours = what == "removing a container"
        removing += ours
        most = max(most, removing)
        try:
            return await call(self, what, act)
        finally:
            removing -= ours

    monkeypatch.setattr(Boxes, "call", counted)
    pool = pool_of(kind, slots=count, start_seconds=600.0)
    await pool.warm()
    assert len(containers()) == count
    await pool.close()
    assert most == count, "none waits until another one is gone"
    assert len(containers()) == CASES["H20"]["expected"]["containers_left"]
