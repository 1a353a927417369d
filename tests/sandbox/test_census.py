"""What boxes do is counted, and stands in /metrics as its reference parser reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from agentrl.errors import SandboxLost
from agentrl.monitor.openmetrics import exposition
from agentrl.sandbox.census import BOUNDS, Figures, added, census, counters
from agentrl.sandbox.pool import Pool
from tests.sandbox.kinds import BOUNDARIES, eventually, long_sleep, nothing_left, pool_of, running

Key = tuple[str, str, str]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def told(figures: Figures, kind: str) -> dict[Key, float]:
    """The samples of one kind, by name and the one label besides."""
    text = exposition({"gauges": figures}, {}, True)
    found = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            if sample.labels.pop("kind", None) == kind:
                rest = "".join(sample.labels.values())
                found[family.type, sample.name.removeprefix("agentrl_sandbox_"), rest] = sample.value
    return found


@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_boxes_programs_and_how_they_ended_are_told(kind: str) -> None:
    before = told(census().figures(), kind)

    def since(*key: str) -> float:
        name: Key = (key[0], key[1], key[2] if len(key) > 2 else "")
        return told(census().figures(), kind)[name] - before.get(name, 0)

    async with pool_of(kind) as pool:
        async with pool.box() as box, pool.box():
            await box.exec(["true"])
            await box.exec(["false"])
            await box.exec(["python3", "-c", "print('x' * 3_000_000)"])
            waiting = asyncio.create_task(anything(pool))
            await asyncio.sleep(0)
            assert since("gauge", "slots") == 2
            assert since("gauge", "boxes", "busy") == 2
            assert since("gauge", "waiting") == 1
        await waiting
        assert since("gauge", "boxes", "idle") == 1, "the other one wrote too much"
        async with pool.box() as box:
            assert (await box.exec(long_sleep(), timeout=0.3)).timed_out
        async with pool.box() as box:
            program = long_sleep()
            lost = asyncio.create_task(box.exec(program, timeout=600))
            await eventually(lambda: bool(running(*program)))
            lost.cancel()
            await asyncio.wait([lost])
            with pytest.raises(SandboxLost):
                await box.exec(["true"])
        assert since("gauge", "boxes", "busy") == 0
    ends = {end: since("counter", "programs_total", end) for end in ("ok", "failed", "output", "timeout", "cancelled")}
    assert ends == {"ok": 2, "failed": 1, "output": 1, "timeout": 1, "cancelled": 1}
    assert since("counter", "programs_total", "lost") == 1
    assert since("counter", "boxes_lost_total") == 1
    assert since("counter", "boxes_replaced_total") == 3
    assert since("counter", "starts_total") >= 3
    assert since("summary", "wait_seconds_count") == 5
    assert since("histogram", "program_seconds_count") == since("histogram", "program_seconds_bucket", "+Inf") == 7
    assert since("histogram", "program_seconds_bucket", "0.25") <= 6, "the time-out came after 0.3 s"
    assert since("histogram", "program_seconds_sum") >= 0.3
    assert since("gauge", "slots") == 0, "a closed pool has no boxes"


async def anything(pool: Pool) -> None:
    async with pool.box() as box:
        await box.exec(["true"])


def test_processes_are_added_up_and_only_counters_outlive_one() -> None:
    one: Figures = {'sandbox_boxes{kind="a",state="idle"}': 2, 'sandbox_starts_total{kind="a"}': 3}
    assert added([one, one]) == {name: 2 * value for name, value in one.items()}
    assert counters(one) == {'sandbox_starts_total{kind="a"}': 3}
    assert list(BOUNDS) == sorted(BOUNDS)
