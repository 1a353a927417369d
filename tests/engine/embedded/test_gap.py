"""Generation is hardly held up: seeds decide samples whatever else runs, and a publish's gap is short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch

from agentrl.engine.client import EngineClient
from agentrl.engine.embedded import scheduler
from agentrl.engine.embedded.__main__ import build
from agentrl.engine.embedded.parameters import load_weights
from agentrl.engine.embedded.sampler import Rule
from agentrl.engine.embedded.sequence import Live
from agentrl.engine.embedded.shape import read_shape
from agentrl.engine.router import Router
from agentrl.engine.server import EngineServer
from agentrl.types import Version
from tests.engine.conftest import Models
from tests.engine.kit import request

embedded_only = pytest.mark.parametrize("server", ["embedded"], indirect=True)


@embedded_only
async def test_a_seed_decides_the_sample_whatever_else_runs(client: EngineClient) -> None:
    alone = await client.generate(request("alone", [5, 6], seed=11, max_tokens=30))
    crowd = [client.generate(request(f"x{i}", [9, i], max_tokens=20 + i)) for i in range(10)]
    among, *_ = await asyncio.gather(client.generate(request("among", [5, 6], seed=11, max_tokens=30)), *crowd)
    other = await client.generate(request("other", [5, 6], seed=12, max_tokens=30))
    assert among.tokens.tolist() == alone.tokens.tolist()
    assert other.tokens.tolist() != alone.tokens.tolist()


@embedded_only
async def test_a_seeded_sample_is_the_same_when_interrupted(client: EngineClient) -> None:
    whole = await client.generate(request("whole", [5, 6], seed=11, max_tokens=60))
    seen: list[int] = []
    task = asyncio.create_task(
        client.generate(request("cut", [5, 6], seed=11, max_tokens=60), lambda part: seen.append(len(part.tokens)))
    )
    for at in (3, 10, 20):
        while not task.done() and (not seen or seen[-1] < at):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await client.abort("cut")
    assert (await task).tokens.tolist() == whole.tokens.tolist()


@embedded_only
async def test_a_publish_tells_its_gap(client: EngineClient, models: Models) -> None:
    # So many tokens that the engine works on for seconds, also while this process stands still.
    tasks = [asyncio.create_task(client.generate(request(f"g{i}", [7] * 400, max_tokens=600))) for i in range(64)]
    before = await client.counters()
    while (await client.counters())["generated_tokens"] < before["generated_tokens"] + 200:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await client.pause()
    await client.update_from_disk(models.folders[1], models.next_version())
    swapped = await client.counters()
    await client.resume()
    while (counters := await client.counters())["generated_tokens"] == swapped["generated_tokens"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert counters["longest_gap_ms"] >= counters["load_ms"] > 0
    assert counters["publishes"] == before["publishes"] + 1


@embedded_only
async def test_a_publish_does_not_wait_for_a_pause(
    server: EngineServer, in_steps: Callable[[int], EngineClient], models: Models
) -> None:
    """Tokens of the old weights go on while the new ones load, and none is lost at the seam."""
    client = in_steps(20)
    router = Router([client])
    before, old = await client.counters(), (await client.model_info()).version
    tasks = [asyncio.create_task(router.generate(request(f"p{i}", [7] * 50, max_tokens=600))) for i in range(4)]
    while (await client.counters())["generated_tokens"] < before["generated_tokens"] + 100:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    report = await router.publish(models.folders[1], models.next_version())
    done = await asyncio.gather(*tasks)
    assert report.updated == (server.url,)
    assert report.stall_seconds == 0.0
    assert all([span.version for span in c.spans] == [old, report.version] for c in done)
    assert all(c.tokens.size == 600 for c in done)


def test_after_a_swap_the_first_goes_on_after_its_own_prefill(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the gap is the load, one prefill and no more; `examples/benchmarks/interrupt.py` measures it."""
    shape = read_shape(models.folders[0])
    app = build(models.folders[0], version=Version(1, 0), dtype=torch.float32, max_running=8, context_length=128)
    engine = app.scheduler
    lives = [
        Live(str(i), np.full(30, 40 + i, np.int32), 100, Rule(seed=i), frozenset(), (), lambda *_: None)
        for i in range(8)
    ]
    with torch.inference_mode():
        for live in lives:
            engine.add(live)
        while engine.waiting:
            engine._prefill()
        engine._step()
        before = [len(live.tokens) for live in lives]
        # As on a machine on which one prompt takes longer than the time that prefilling may hold the others up.
        monkeypatch.setattr(scheduler, "_PREFILL_SECONDS", 0.0)
        engine.swap(load_weights(models.folders[1], shape, torch.float32), "1.1", keep_kv=False)
        for done in range(1, 9):
            engine._prefill()
            assert (engine.running, engine.waiting) == (done, 8 - done)
            engine._step()
            grown = [len(live.tokens) - n for live, n in zip(lives, before, strict=True)]
            assert grown == [*range(done + 1, 1, -1), *[0] * (8 - done)]
    assert all(live.changes == [("1.0", n)] for live, n in zip(lives, before, strict=True))


def test_few_tokens_are_packed_on_a_slow_machine_too(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose prompt is in the cache waits for one pass, not for one a member: each has one token to prefill."""
    app = build(models.folders[0], version=Version(1, 0), dtype=torch.float32, max_running=16, context_length=128)
    engine = app.scheduler
    monkeypatch.setattr(scheduler, "_PREFILL_SECONDS", 0.0)
    prompt = np.full(30, 40, np.int32)
    with torch.inference_mode():
        for i in range(9):
            engine.add(Live(str(i), prompt, 100, Rule(seed=i), frozenset(), (), lambda *_: None))
        engine._prefill()
        assert (engine.running, engine.waiting) == (1, 8)
        engine._prefill()
    assert (engine.running, engine.waiting) == (9, 0)
    assert engine.counters.prefilled_tokens == 30 + 8


@embedded_only
async def test_a_group_prompt_is_prefilled_once(client: EngineClient) -> None:
    before = await client.counters()
    prompt = list(range(40, 140))
    await asyncio.gather(*(client.generate(request(f"h{i}", prompt, max_tokens=3)) for i in range(8)))
    after = await client.counters()
    assert after["prefilled_tokens"] - before["prefilled_tokens"] <= len(prompt) + 8
    assert after["cached_tokens"] - before["cached_tokens"] >= 7 * (len(prompt) - 1)
