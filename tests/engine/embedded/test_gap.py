"""Generation is hardly held up: seeds decide samples whatever else runs, and a publish's gap is short."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.engine.client import EngineClient
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
async def test_the_gap_of_a_publish(client: EngineClient, models: Models) -> None:
    tasks = [asyncio.create_task(client.generate(request(f"g{i}", [7] * 400, max_tokens=400))) for i in range(24)]
    before = await client.counters()
    while (await client.counters())["generated_tokens"] < before["generated_tokens"] + 200:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await client.pause()
    await client.update_from_disk(models.folders[1], models.next_version())
    await client.resume()
    await asyncio.gather(*tasks)
    counters = await client.counters()
    assert counters["longest_gap_ms"] > 0
    # Load time, one prefill of 400 tokens and 100 ms; the rest is for a busy test machine.
    assert counters["longest_gap_ms"] < counters["load_ms"] + 400


@embedded_only
async def test_a_group_prompt_is_prefilled_once(client: EngineClient) -> None:
    before = await client.counters()
    prompt = list(range(40, 140))
    await asyncio.gather(*(client.generate(request(f"h{i}", prompt, max_tokens=3)) for i in range(8)))
    after = await client.counters()
    assert after["prefilled_tokens"] - before["prefilled_tokens"] <= len(prompt) + 8
    assert after["cached_tokens"] - before["cached_tokens"] >= 7 * (len(prompt) - 1)
