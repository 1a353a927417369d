"""The publisher: newest first, failures leave the old weights, old folders go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.conductor.feed import WeightsReady
from agentrl.conductor.publish import Published, Publisher
from agentrl.errors import EngineError, RunError
from agentrl.types import Version


class Engines:
    """Loads weights when the test lets it, and fails as often as told."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.failures = 0

    async def publish(self, path: Path, version: Version) -> str:
        self.asked.append(str(version))
        await self.go.wait()
        if self.failures:
            self.failures -= 1
            raise EngineError("out of memory")
        self.loaded.append(str(version))
        return f"loaded {version}"


class Setup(NamedTuple):
    publisher: Publisher[str]
    engines: Engines
    done: list[Published[str]]
    notes: list[str]
    folder: Path
    task: asyncio.Task[None]

    def offer(self, number: int) -> None:
        path = self.folder / str(number)
        path.mkdir()
        self.publisher.offer(WeightsReady(step=number, version=f"1.{number}", path=str(path), seconds=0.1))

    async def under_way(self, number: int) -> None:
        async with asyncio.timeout(60):
            while f"1.{number}" not in self.engines.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def left(self) -> set[str]:
        return {p.name for p in self.folder.iterdir()}


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    engines, done, notes = Engines(), list[Published[str]](), list[str]()

    async def on_published(published: Published[str]) -> None:
        done.append(published)

    publisher: Publisher[str] = Publisher(engines.publish, on_published, notes.append, owned=tmp_path, retry_after=0.01)
    task = asyncio.create_task(publisher.run())
    yield Setup(publisher, engines, done, notes, tmp_path, task)
    task.cancel()


async def test_each_version_goes_out_and_the_folder_before_it_goes(setup: Setup) -> None:
    setup.engines.go.set()
    for number in (1, 2, 3):
        setup.offer(number)
        assert await setup.publisher.drained(60)
    assert setup.engines.loaded == ["1.1", "1.2", "1.3"]
    assert [(p.step, p.skipped, p.report) for p in setup.done] == [(n, 0, f"loaded 1.{n}") for n in (1, 2, 3)]
    assert setup.left() == {"3"}


async def test_a_version_overtaken_while_waiting_is_skipped_and_counted(setup: Setup) -> None:
    setup.offer(1)
    await setup.under_way(1)
    setup.offer(2)
    setup.offer(3)
    assert not await setup.publisher.drained(0.05)
    setup.engines.go.set()
    assert await setup.publisher.drained(60)
    assert setup.engines.loaded == ["1.1", "1.3"]
    assert [p.skipped for p in setup.done] == [0, 1]
    assert setup.left() == {"3"}


async def test_weights_that_are_offered_twice_stay_until_they_are_out(setup: Setup) -> None:
    """The trainer asks again where the first answer did not reach it."""
    setup.offer(1)
    await setup.under_way(1)
    setup.offer(2)
    again = WeightsReady(step=2, version="1.2", path=str(setup.folder / "2"), seconds=0.1)
    setup.publisher.offer(again)
    assert setup.left() == {"1", "2"}
    setup.engines.go.set()
    assert await setup.publisher.drained(60)
    assert setup.engines.loaded == ["1.1", "1.2"]
    assert [p.skipped for p in setup.done] == [0, 0]


async def test_a_failed_publish_is_tried_again(setup: Setup) -> None:
    setup.engines.go.set()
    setup.engines.failures = 2
    setup.offer(1)
    assert await setup.publisher.drained(60)
    assert setup.engines.loaded == ["1.1"]
    assert setup.notes[0] == "publish of 1.1 failed (1 of 3), engines keep their weights: out of memory"


async def test_three_failures_end_the_run_with_the_reason(setup: Setup) -> None:
    setup.engines.go.set()
    setup.engines.failures = 3
    setup.offer(1)
    with pytest.raises(RunError, match=r"refused version 1\.1 at .* 3 times, last: out of memory; see logs/engine"):
        await asyncio.wait_for(setup.task, 60)


async def test_going_back_drops_what_waits_and_deletes_nothing_that_is_not_ours(
    setup: Setup, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    setup.offer(1)
    await setup.under_way(1)
    setup.offer(2)
    back = asyncio.create_task(setup.publisher.force(checkpoint, Version(2, 0)))
    await asyncio.sleep(0.05)
    setup.engines.go.set()
    await back
    assert setup.engines.loaded[-1] == "2.0"
    assert [str(p.version) for p in setup.done] in (["1.1"], ["1.1", "1.2"])
    assert setup.left() == set()
    setup.offer(3)
    assert await setup.publisher.drained(60)
    assert checkpoint.is_dir()
    assert setup.left() == {"3"}
