"""Which box the next user gets, and what two boxes share: nothing."""

from __future__ import annotations

import os

import pytest

from agentrl.errors import ConfigError
from agentrl.sandbox.rootfs import build_rootfs
from agentrl.sandboxes.docker import REPOSITORY
from tests.sandbox.kinds import BOUNDARIES, BUBBLEWRAP, DOCKER, pool_of

LIMITS = {"memory_mb": 64, "disk_mb": 4, "output_bytes": 4096}
HITS = {
    "time-out": ("while True: pass", "timed_out", 1.0),
    "memory": ("bytearray(300 << 20)", "oom", 60.0),
    "flood": ("while True: print('x' * 1000)", "truncated", 60.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_a_box_is_kept_warm_until_a_limit_is_hit_in_it(kind: str) -> None:
    async with pool_of(kind, slots=1, **LIMITS) as pool:
        async with pool.box() as first:
            assert (await first.exec(["false"])).returncode == 1
        for program, how, timeout in HITS.values():
            async with pool.box() as box:
                assert box is first
                done = await box.exec(["python3", "-c", program], timeout=timeout)
                assert getattr(done, how), done
            async with pool.box() as first:
                assert first is not box
                assert (await first.exec(["true"])).ok


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_programs_that_fork_until_nothing_goes_cost_the_next_user_nothing(kind: str) -> None:
    bomb = (
        "import os, time\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(600)\n    except OSError: pass"
    )
    async with pool_of(kind, slots=1, pids=20) as pool:
        async with pool.box() as box:
            assert (await box.exec(["python3", "-c", bomb], timeout=1.0)).timed_out
        async with pool.box() as box:
            assert (await box.exec(["sh", "-c", "echo ok | cat"])).stdout == b"ok\n"


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_every_box_gives_the_same_output(kind: str) -> None:
    asked = "hash('a'), time.tzname, locale.getpreferredencoding().lower(), sys.stdout.encoding"
    program = f"import locale, sys, time; print({asked})"
    async with pool_of(kind) as pool, pool.box() as one, pool.box() as other:
        said = [(await box.exec(argv)).stdout for box in (one, other) for argv in (["python3", "-c", program],) * 2]
        with_exec = (await one.exec(["sh", "-c", f'exec python3 -c "{program}"'])).stdout
    assert {*said, with_exec} == {said[0]}
    assert b"('UTC', 'UTC') utf-8 utf-8" in said[0]


@pytest.mark.skipif(os.getuid() != 0, reason="others have one id")
@pytest.mark.parametrize("kind", [BUBBLEWRAP])
async def test_programs_of_two_boxes_are_two_users_of_the_kernel(kind: str) -> None:
    async with pool_of(kind) as pool, pool.box() as one, pool.box() as other:
        ids = [int((await box.exec(["python3", "-c", "import os; print(os.getuid())"])).stdout) for box in (one, other)]
    assert ids[0] != ids[1]
    assert min(ids) >= 1_000_000


@pytest.mark.parametrize("kind", [DOCKER])
async def test_an_image_by_name(kind: str) -> None:
    async with pool_of(kind, slots=1) as pool, pool.box():
        pass  # the image is there now
    async with pool_of(kind, slots=1, image=f"{REPOSITORY}:{build_rootfs().name}") as pool, pool.box() as box:
        assert (await box.exec(["python3", "-c", "print(1)"])).stdout == b"1\n"
    with pytest.raises(ConfigError, match="is not here and cannot be pulled"):
        pool_of(kind, image="127.0.0.1:9/no/such:image")


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_standard_streams_can_be_opened_by_name(kind: str) -> None:
    program = (
        "import sys\nopen('/dev/stdout', 'w').write(open('/dev/stdin').read())\nopen('/dev/stderr', 'w').write('e')"
    )
    async with pool_of(kind, slots=1) as pool, pool.box() as box:
        for argv in (["python3", "-c", program], ["sh", "-c", "cat /dev/stdin > /dev/stdout; printf e > /dev/stderr"]):
            done = await box.exec(argv, stdin=b"in")
            assert (done.stdout, done.stderr) == (b"in", b"e"), done
