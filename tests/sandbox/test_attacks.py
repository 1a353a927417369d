"""The attack suite: what gets out of each kind of box, and what is left after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import SandboxLost
from agentrl.sandbox.pool import Pool
from tests.sandbox.attacks import CPU, DISK_MB, INODES, MEMORY_MB, OUTPUT, PIDS, Attack, World, attacks, breach, world
from tests.sandbox.kinds import BOUNDARIES, needs_bwrap, nothing_left, pool_of

LOST = "the box was lost"
LIMITS = {
    "memory_mb": MEMORY_MB,
    "disk_mb": DISK_MB,
    "pids": PIDS,
    "inodes": INODES,
    "output_bytes": OUTPUT,
    "cpu": CPU,
}


async def _breaches(kind: str, host: World, tried: list[Attack], **settings: object) -> dict[str, str]:
    found = {}
    with nothing_left():
        async with pool_of(kind, **LIMITS, **settings) as pool:
            for attack in tried:
                # A lost box is an infrastructure fault, asked again; what costs every box is a breach.
                through = await _try(attack, pool, host)
                if through.startswith(LOST):
                    through = await _try(attack, pool, host)
                if through:
                    found[attack.name] = through
    return found


async def _try(attack: Attack, pool: Pool, host: World) -> str:
    async with pool.box() as box:
        try:
            return await breach(attack, box, host)
        except SandboxLost as error:
            return f"{LOST}: {error}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_nothing_gets_out(kind: str, tmp_path: Path) -> None:
    with world(tmp_path) as host:
        tried = attacks(host)
        assert len(tried) >= 25
        assert await _breaches(kind, host, tried) == {}


@needs_bwrap
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_without_cgroups_only_shares_of_the_machine_can_be_overused(tmp_path: Path) -> None:
    with world(tmp_path) as host:
        found = await _breaches("bubblewrap", host, attacks(host), cgroups="off")
        assert set(found) <= {"memory in many processes", "CPU share"}, found


@needs_bwrap
async def test_the_quick_attacks_do_not_get_out(tmp_path: Path) -> None:
    names = {"tcp socket", "abstract socket", "host file 0644", "parent's environment", "kill the server"}
    names |= {"kill everything", "write outside", "double-fork daemon", "links in results", "new user namespace"}
    names |= {"fork bomb, counted"}
    with world(tmp_path) as host:
        tried = [attack for attack in attacks(host) if attack.name in names]
        assert len(tried) == len(names)
        assert await _breaches("bubblewrap", host, tried) == {}
