"""From the trainer's weights to the engine's next token: 46M parameters into the embedded engine.

    python examples/benchmarks/publish.py [--rounds 7]

The trainer (ZeRO-3, one rank) gathers bucket by bucket and writes a folder in Hugging Face form into shared memory,
where there is any; the router has the engine, which is generating, load and take it. `publish_s` is all of that,
`stall_s` the engine's longest time without a token around it, by its own count, `write_s` the trainer's part; medians
over the rounds after the first. After each round the engine's first token must be the new weights'. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.train.__main__ import prepare_environment

prepare_environment()

import torch  # noqa: E402

from agentrl.engine.client import EngineClient  # noqa: E402
from agentrl.engine.options import EngineOptions  # noqa: E402
from agentrl.engine.router import Router  # noqa: E402
from agentrl.engine.server import start_engine  # noqa: E402
from agentrl.engine.types import GenerateRequest, Sampling  # noqa: E402
from agentrl.testing.tiny import make_tiny_model  # noqa: E402
from agentrl.train import persist  # noqa: E402
from agentrl.train.deepspeed import Backend  # noqa: E402
from agentrl.train.options import TrainOptions  # noqa: E402
from agentrl.types import Version  # noqa: E402

SHAPE: dict[str, Any] = {"layers": 12, "hidden": 512, "heads": 8, "kv_heads": 8, "intermediate": 1344}
"""Twelve blocks of 3.1M parameters, an embedding and a head over the tokenizer below: 46M."""
SHARED = Path("/dev/shm")


class Requests:
    """Eight requests that are always running."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._tasks = [asyncio.create_task(self._one(i)) for i in range(8)]

    async def _one(self, index: int) -> None:
        number = 0
        while True:
            number += 1
            await self._client.generate(ask(f"{index}-{number}", 200, 1.0))

    async def stop(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


def ask(id: str, tokens: int, temperature: float) -> GenerateRequest:
    """A request with a short prompt."""
    deadline = asyncio.get_running_loop().time() + 300
    sampling = Sampling(max_tokens=tokens, temperature=temperature)
    return GenerateRequest(id, id, np.arange(5, 21, dtype=np.int32), sampling, deadline)


async def measure(
    folder: Path,
    work: Path,
    rounds: int,
    train: TrainOptions = TrainOptions(),
    engine: EngineOptions = EngineOptions(context_length=512),
) -> dict[str, float]:
    """Publish again and again while the engine generates."""
    backend = Backend(folder, train)
    parameters = sum(torch.Size(shape.shape).numel() for shape in backend.shapes)
    server = start_engine(engine, folder, Version(1, 0), work / "engine.log")
    router: Router | None = None
    try:
        await server.wait_ready()
        client = server.client()
        router = Router([client])
        requests = Requests(client)
        await asyncio.sleep(1.0)
        spent: list[tuple[float, float, float]] = []
        for number in range(1, rounds + 1):
            version, target = Version(1, number), work / f"1.{number}"
            begun = time.perf_counter()
            await asyncio.to_thread(persist.write_weights, backend, folder, target)
            written = time.perf_counter()
            await router.publish(target, version)
            published = time.perf_counter() - begun
            completion = await client.generate(ask(f"proof-{number}", 4, 0.0))
            stalled = 1e-3 * (await client.counters())["longest_gap_ms"]
            spent.append((published, stalled, written - begun))
            assert completion.spans[0].version == version, completion.spans
            shutil.rmtree(work / f"1.{number - 1}", ignore_errors=True)
            print(f"publish {spent[-1][0]:.3f} s, stall {spent[-1][1]:.3f} s, writing {spent[-1][2]:.3f} s")
            await asyncio.sleep(0.3)
        await requests.stop()
    finally:
        if router is not None:
            await router.close()
        await server.stop()
    publish_s, stall_s, write_s = (statistics.median(column) for column in zip(*spent[1:], strict=True))
    return {
        "parameters": parameters,
        "shared_memory": float(work.is_relative_to(SHARED)),
        "write_s": round(write_s, 3),
        "publish_s": round(publish_s, 3),
        "stall_s": round(stall_s, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as scratch:
        work = Path(scratch)
        folder = make_tiny_model(work / "model", fixed=[f"word{i}" for i in range(8000)], tie=False, **SHAPE)
        print(json.dumps(asyncio.run(measure(folder, work, max(options.rounds, 2)))))


if __name__ == "__main__":
    main()
