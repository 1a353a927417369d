"""One suite, two engines: every protocol fact that the client builds on, and the numbers that come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from agentrl.engine.client import EngineClient
from agentrl.engine.server import EngineServer, decoder
from agentrl.engine.types import Completion, Span
from agentrl.engine.weights import model_limits
from agentrl.errors import EngineError, RequestRefused
from agentrl.types import Version
from tests.engine import oracle
from tests.engine.conftest import Models
from tests.engine.kit import request, until

PROMPT = [5, 60, 7, 33, 21]
InSteps = Callable[[int], EngineClient]


async def _publish(client: EngineClient, folder: Path, version: Version) -> None:
    await client.pause()
    try:
        await client.update_from_disk(folder, version)
    finally:
        await client.resume()


def _check(
    done: Completion, folder_of: dict[Version, Path], prompt: list[int] = PROMPT, temperature: float = 1.0
) -> None:
    assert oracle.worst_error(prompt, done, folder_of, temperature) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_a_fresh_forward_pass(
    client: EngineClient, models: Models, temperature: float
) -> None:
    done = await client.generate(request("a", PROMPT, max_tokens=40, temperature=temperature))
    assert client.version is not None
    assert done.spans == (Span(client.version, 0, len(done.tokens)),)
    _check(done, {client.version: models.folders[0]}, temperature=temperature or 1.0)
    if temperature == 0:
        table = oracle.logprobs(models.folders[0], [*PROMPT, *done.tokens.tolist()])
        assert table[len(PROMPT) - 1 : -1].argmax(1).tolist() == done.tokens.tolist()


@pytest.mark.slow
async def test_many_at_once_and_a_shared_prefix(client: EngineClient, models: Models) -> None:
    prompts = [[*range(40, 80), i] for i in range(12)] + [[*range(40, 60)]] * 4 + [[i] for i in range(4)]
    done = await asyncio.gather(
        *(client.generate(request(f"p{i}", p, max_tokens=10 + i)) for i, p in enumerate(prompts))
    )
    assert client.version is not None
    for prompt, completion in zip(prompts, done, strict=True):
        _check(completion, {client.version: models.folders[0]}, prompt)
    # The next turn of a conversation: the engine may use what it has cached, and must get the same numbers.
    first = [*prompts[0], *done[0].tokens.tolist(), 9, 10, 11]
    again = await client.generate(request("again", first, max_tokens=10))
    _check(again, {client.version: models.folders[0]}, first)


@pytest.mark.slow
async def test_update_in_the_middle_of_many_requests(in_steps: InSteps, models: Models) -> None:
    client = in_steps(25)
    await client.model_info()
    assert client.version is not None
    folder_of = {client.version: models.folders[0]}
    prompts = [[*PROMPT, i] for i in range(64)]
    # Streams hold a real server's HTTP side back, so only a few say when to publish.
    seen = dict.fromkeys(range(0, 64, 16), 0)

    def run(i: int) -> asyncio.Task[Completion]:
        watch = (lambda part: seen.__setitem__(i, len(part.tokens))) if i in seen else None
        return asyncio.create_task(client.generate(request(f"u{i}", prompts[i], max_tokens=100), watch))

    tasks = [run(i) for i in range(64)]
    await until(lambda: min(seen.values()) >= 3, 600.0)
    new = models.next_version()
    folder_of[new] = models.folders[1]
    await _publish(client, models.folders[1], new)
    done = await asyncio.gather(*tasks)
    seams = [c for c in done if len(c.spans) == 2]
    assert len(seams) >= 48
    for prompt, completion in zip(prompts, done, strict=True):
        _check(completion, folder_of, prompt)
        assert len(completion.tokens) == 100


@pytest.mark.slow
async def test_five_updates_in_one_request(in_steps: InSteps, models: Models) -> None:
    client = in_steps(100)
    await client.model_info()
    assert client.version is not None
    folder_of = {client.version: models.folders[0]}
    tasks = [asyncio.create_task(client.generate(request(f"five{i}", PROMPT, max_tokens=600))) for i in range(4)]
    for i in range(1, 6):
        # As long as another request of 12 tokens takes. (A real server's stream falls silent after a retraction.)
        await client.generate(request(f"probe{i}", PROMPT, max_tokens=12))
        version = models.next_version()
        folder_of[version] = models.folders[i % 3]
        await _publish(client, models.folders[i % 3], version)
    for completion in await asyncio.gather(*tasks):
        assert len(completion.tokens) == 600
        assert [s.version for s in completion.spans] == list(folder_of)
        _check(completion, folder_of)


async def test_requests_that_arrive_during_a_pause_run_afterwards(client: EngineClient, models: Models) -> None:
    await client.pause()
    held = await _held(client)
    task = asyncio.create_task(client.generate(request("late", PROMPT)))
    await _one_more(client, held)
    assert not task.done()
    assert (await client.model_info()).version == client.version
    new = models.next_version()
    await client.update_from_disk(models.folders[2], new)
    await client.resume()
    done = await task
    assert [s.version for s in done.spans] == [new]
    _check(done, {new: models.folders[2]})


async def test_an_update_during_prefill(client: EngineClient, models: Models) -> None:
    """Prompts of 900 tokens are being read when the weights change: no token mixes two versions."""
    assert client.version is not None
    folder_of = {client.version: models.folders[0]}
    prompts = [[*range(3, 200), *([9 + i] * 703)] for i in range(6)]
    tasks = [asyncio.create_task(client.generate(request(f"p{i}", p, max_tokens=3))) for i, p in enumerate(prompts)]
    for i in (1, 2):
        await asyncio.sleep(0.02)
        new = models.next_version()
        folder_of[new] = models.folders[i]
        await _publish(client, models.folders[i], new)
    for prompt, done in zip(prompts, await asyncio.gather(*tasks), strict=True):
        assert len(done.tokens) == 3
        _check(done, folder_of, prompt)


async def test_cancelled_requests_leave_the_engine(client: EngineClient, server: EngineServer) -> None:
    seen: set[int] = set()

    def run(i: int) -> asyncio.Task[Completion]:
        watch = (lambda _: seen.add(i)) if i % 2 else None
        return asyncio.create_task(client.generate(request(f"c{i}", PROMPT, max_tokens=900), watch))

    tasks = [run(i) for i in range(8)]
    await until(lambda: len(seen) == 4)
    await client.pause()
    held = await _held(client)
    late = asyncio.create_task(client.generate(request("c-late", PROMPT, max_tokens=900)))
    await _one_more(client, held)
    for task in (*tasks, late):
        task.cancel()
    await asyncio.gather(*tasks, late, return_exceptions=True)
    await client.resume()

    async def again(i: int) -> Completion:
        """Their ids are free again only when they are gone, which a real server says a while after it was told."""
        while True:
            try:
                return await client.generate(request(f"c{i}", PROMPT, max_tokens=4))
            except RequestRefused:
                await asyncio.sleep(0.1)

    async with asyncio.timeout(100):
        done = await asyncio.gather(*(again(i) for i in range(8)))
    assert [len(c.tokens) for c in done] == [4] * 8


@pytest.mark.parametrize("after_pause", [False, True])
async def test_an_aborted_request_goes_on_by_itself(client: EngineClient, models: Models, after_pause: bool) -> None:
    seen: list[int] = []
    task = asyncio.create_task(
        client.generate(
            request("ab", PROMPT, max_tokens=120, temperature=0.0), lambda partial: seen.append(len(partial.tokens))
        )
    )
    await until(lambda: len(seen) >= 5)
    if after_pause:
        await client.pause()
    await client.abort("ab")
    if after_pause:
        await client.resume()
    done = await task
    whole = await client.generate(request("whole", PROMPT, max_tokens=120, temperature=0.0))
    assert done.tokens.tolist() == whole.tokens.tolist()
    assert (done.finish, done.matched) == (whole.finish, whole.matched)
    assert np.abs(done.logprobs - whole.logprobs).max() < 1e-4


async def test_a_failed_update_leaves_the_old_version_serving(
    client: EngineClient, models: Models, tmp_path: Path
) -> None:
    before, sums = client.version, await client.checksums()
    assert before is not None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    await client.pause()
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(EngineError):
            await client.update_from_disk(folder, models.next_version())
    await client.resume()
    assert (await client.model_info()).version == before
    assert await client.checksums() == sums
    _check(await client.generate(request("still", PROMPT)), {before: models.folders[0]})


async def test_checksums_prove_a_publish(client: EngineClient, models: Models) -> None:
    first = await client.checksums()
    await client.update_from_disk(models.folders[1], models.next_version())
    second = await client.checksums()
    await client.update_from_disk(models.folders[0], models.next_version())
    assert first.keys() == second.keys()
    assert first != second
    assert await client.checksums() == first


async def test_a_duplicate_live_id_is_refused(client: EngineClient) -> None:
    await client.pause()
    held = await _held(client)
    task = asyncio.create_task(client.generate(request("twin", PROMPT)))
    await _one_more(client, held)
    with pytest.raises(RequestRefused, match="400"):
        await client.generate(request("twin", PROMPT))
    await client.resume()
    assert len((await task).tokens) > 0


@pytest.mark.parametrize("prompt", [[1024], [-1]])
async def test_wrong_ids_are_refused_and_the_engine_lives(client: EngineClient, prompt: list[int]) -> None:
    with pytest.raises(RequestRefused, match="vocabulary"):
        await client.generate(request("bad", prompt))
    assert len((await client.generate(request("good", PROMPT))).tokens) > 0


async def test_the_context_ends_a_generation(client: EngineClient) -> None:
    with pytest.raises(RequestRefused, match="1024"):
        await client.generate(request("long", [5] * 1024))
    done = await client.generate(request("edge", [5] * 1010, max_tokens=50))
    assert done.finish == "length"
    assert 12 <= len(done.tokens) <= 14


async def test_stops(client: EngineClient) -> None:
    whole = (await client.generate(request("w", PROMPT, max_tokens=30, temperature=0.0))).tokens.tolist()
    stop_id = whole[4]
    done = await client.generate(request("s", PROMPT, max_tokens=30, temperature=0.0, stop_token_ids=(stop_id,)))
    first = whole.index(stop_id)
    assert (done.tokens.tolist(), done.finish, done.matched) == (whole[: first + 1], "stop", stop_id)


async def test_streamed_tokens_are_prefixes(client: EngineClient) -> None:
    parts: list[Completion] = []
    done = await client.generate(request("st", PROMPT, max_tokens=200), parts.append)
    assert len(parts) >= 3
    for part in parts:
        assert part.finish == "length"
        assert part.tokens.tolist() == done.tokens[: len(part.tokens)].tolist()


async def test_a_pause_waits_for_no_request(in_steps: InSteps) -> None:
    client = in_steps(100)
    tasks = [asyncio.create_task(client.generate(request(f"q{i}", PROMPT, max_tokens=900))) for i in range(8)]
    await client.generate(request("probe", PROMPT, max_tokens=4))
    await client.pause()
    assert not any(task.done() for task in tasks)
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in tasks)
    await client.resume()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("chunk", [1, 16, 256])
async def test_chunks_are_exact(client: EngineClient, server: EngineServer, models: Models, chunk: int) -> None:
    folder = models.folders[0]
    decode = decoder(folder)
    assert decode is not None
    cut = EngineClient(server.url, limits=model_limits(folder), decode=decode, chunk_tokens=chunk)
    whole = await client.generate(request("whole", PROMPT, max_tokens=40, temperature=0.0))
    printable = [i for i, token in enumerate(whole.tokens.tolist()) if i > 2 and decode([token]).isascii()]
    stops: list[dict[str, Any]] = [{}, {"stop_token_ids": (int(whole.tokens[17]),)}]
    stops += [{"stop": (decode([int(whole.tokens[i])]),)} for i in printable[:1]]
    for i, settings in enumerate(stops):
        one = await client.generate(request(f"one{i}", PROMPT, max_tokens=40, temperature=0.0, **settings))
        many = await cut.generate(request(f"many{i}", PROMPT, max_tokens=40, temperature=0.0, **settings))
        assert many.tokens.tolist() == one.tokens.tolist()
        assert (many.finish, many.matched, many.spans) == (one.finish, one.matched, one.spans)
        assert np.abs(many.logprobs - one.logprobs).max() < 1e-4
    sampled = await cut.generate(request("sampled", PROMPT, max_tokens=40))
    assert len(sampled.tokens) == 40
    assert client.version is not None
    _check(sampled, {client.version: folder})
    await cut.close()


async def test_a_publish_by_aborting(client: EngineClient, server: EngineServer, models: Models) -> None:
    """As for servers that cannot retract: what they send back is kept, the rest is asked again with the new weights."""
    assert client.version is not None
    folder_of = {client.version: models.folders[0], (new := models.next_version()): models.folders[1]}
    old = EngineClient(server.url, limits=model_limits(models.folders[0]), pause_mode="abort", chunk_tokens=64)
    tasks = [asyncio.create_task(old.generate(request(f"old{i}", PROMPT, max_tokens=300))) for i in range(8)]
    await client.generate(request("probe", PROMPT, max_tokens=12))
    await _publish(old, models.folders[1], new)
    for done in await asyncio.gather(*tasks):
        assert len(done.tokens) == 300
        assert done.spans[-1].version == new
        _check(done, folder_of)
    await old.close()


async def test_unknown_settings_are_refused(server: EngineServer) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, "temprature": 1}, "rid": "x"}
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/generate", json=body) as response:
        assert response.status == 400


async def _held(client: EngineClient) -> int | None:
    """How many requests the engine has; a real server does not say which ones wait."""
    told = await client.counters()
    return None if "waiting" not in told else int(told["running"] + told["waiting"])


async def _one_more(client: EngineClient, before: int | None) -> None:
    """Wait until another request has come to the engine."""
    if before is None:
        await asyncio.sleep(1.0)
        return
    while await _held(client) == before:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
