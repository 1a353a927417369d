"""The tree of downloads, in virtual time: every host's link carries one copy a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from agentrl.cluster.spread import spread
from agentrl.errors import EngineError
from agentrl.testing.clock import run_virtual


class Hosts:
    def __init__(self, broken: Sequence[str] = (), slow: Sequence[str] = ()) -> None:
        self.broken, self.slow = broken, slow
        self.have = {"origin"}
        self.serving: Counter[str] = Counter()
        self.most = 0

    async def fetch(self, target: str, sources: Sequence[str]) -> None:
        source = sources[0]
        assert source in self.have, "only who has it serves it"
        self.serving[source] += 1
        self.most = max(self.most, self.serving[source])
        try:
            await asyncio.sleep(1000.0 if target in self.slow else 1.0)
        finally:
            self.serving[source] -= 1
        if target in self.broken:
            raise EngineError("its disk is full")
        self.have.add(target)


def seconds_to(count: int, fanout: int = 2) -> float:
    hosts = Hosts()
    targets = [f"h{i}" for i in range(count)]

    async def go() -> float:
        begin = asyncio.get_running_loop().time()
        assert await spread("origin", targets, hosts.fetch, fanout=fanout, seconds=1e6) == {}
        return asyncio.get_running_loop().time() - begin

    taken = run_virtual(go())
    assert hosts.have == {"origin", *targets}
    assert hosts.most <= fanout
    return taken


def test_the_time_grows_with_the_logarithm_of_the_hosts() -> None:
    times = {count: seconds_to(count) for count in (1, 8, 64, 512)}
    assert times == {1: 1.0, 8: 2.0, 64: 4.0, 512: 6.0}


@pytest.mark.parametrize("fanout", [1, 3])
def test_other_fanouts(fanout: int) -> None:
    assert seconds_to(63, fanout) == {1: 6.0, 3: 3.0}[fanout]


def test_one_slow_host_and_one_broken_one_hold_up_nobody() -> None:
    hosts = Hosts(broken=["h1"], slow=["h0"])
    targets = [f"h{i}" for i in range(16)]
    failed = run_virtual(spread("origin", targets, hosts.fetch, fanout=2, seconds=20.0))
    assert failed == {"h1": "its disk is full", "h0": "it took longer than 20 s"}
    assert hosts.have == {"origin", *targets} - {"h0", "h1"}
