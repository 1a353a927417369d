"""What a change of weights costs the requests that run: how long they stall, and whether a token is lost.

    python examples/benchmarks/interrupt.py                                   # the embedded engine
    python examples/benchmarks/interrupt.py --sglang path/to/venv/bin/python  # and a real SGLang on the CPU

16 long requests run all the time, four of them streamed, and 4 workers ask for one token over and over, while new
weights are published ten times: pause at the next token, load from disk, continue. `pause_ack_ms` is how long a pause
takes to be acknowledged, `load_ms` the load, `stall_ms` the time between the last token of the old weights and the
first of the new that came to the client, the load included (medians, with the largest as `…_max`). `lost` counts the
tokens that requests asked for and did not get, `seams` the long requests that several versions made.

The embedded engine needs no pause, it swaps weights between two tokens: that is measured too, in keys with `_swap`.

The last line is JSON; SGLang's keys end in `_sglang`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from agentrl.engine.client import EngineClient
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer, start_engine
from agentrl.engine.types import Completion, GenerateRequest, Sampling
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Version

LONG, SHORT, STREAMED = 16, 4, 4
LONG_TOKENS, SHORT_TOKENS = 400, 1
PUBLISHES = 10
CALL_SECONDS = 300.0


@dataclass
class Seen:
    """What came back: when each version's first and last token arrived, and what is missing."""

    first: dict[Version, float] = field(default_factory=dict)
    last: dict[Version, float] = field(default_factory=dict)
    lost: int = 0
    seams: int = 0
    requests: int = 0

    def add(self, done: Completion, asked: int) -> None:
        """Note a reply."""
        if asked == SHORT_TOKENS:
            self.token(done)
        self.requests += 1
        self.lost += asked - len(done.tokens)
        self.seams += len(done.spans) > 1

    def token(self, so_far: Completion) -> None:
        """Note the newest token, which has just been made."""
        now, version = time.monotonic(), so_far.spans[-1].version
        self.first.setdefault(version, now)
        self.last[version] = now

    def stalls(self, versions: Sequence[Version]) -> list[float]:
        """Milliseconds from the last token of each version to the first of the next."""
        pairs = pairwise(versions)
        return [1e3 * (self.first[new] - self.last[old]) for old, new in pairs if old in self.last]


async def ask_forever(
    client: EngineClient, name: str, tokens: int, seen: Seen, stop: asyncio.Event, streamed: bool = False
) -> None:
    """One request after the other until `stop`; the last one is waited for."""
    for number in count():
        if stop.is_set():
            return
        prompt = np.array([*range(40, 60), 40 + number % 50], np.int32)
        deadline = asyncio.get_running_loop().time() + CALL_SECONDS
        sampling = Sampling(max_tokens=tokens, seed=number)
        request = GenerateRequest(f"{name}-{number}", name, prompt, sampling, deadline)
        seen.add(await client.generate(request, seen.token if streamed else None), tokens)


async def measure(server: EngineServer, folders: Sequence[Path], *, pausing: bool) -> dict[str, float]:
    """Publish while requests run."""
    client, seen, stop = server.client(), Seen(), asyncio.Event()
    versions, acks, loads = [server.version], [], []
    async with asyncio.TaskGroup() as group:
        for i in range(LONG):
            group.create_task(ask_forever(client, f"long{i}", LONG_TOKENS, seen, stop, i < STREAMED))
        for i in range(SHORT):
            group.create_task(ask_forever(client, f"short{i}", SHORT_TOKENS, seen, stop))
        for number in range(PUBLISHES):
            while versions[-1] not in seen.last:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            began = time.monotonic()
            if pausing:
                await client.pause()
                acks.append(1e3 * (time.monotonic() - began))
                began = time.monotonic()
            versions.append(Version(1, number + 1))
            await client.update_from_disk(folders[number % len(folders)], versions[-1])
            loads.append(1e3 * (time.monotonic() - began))
            if pausing:
                await client.resume()
        await asyncio.sleep(0.5)
        stop.set()
    await client.close()
    out = {"lost": float(seen.lost), "seams": float(seen.seams), "requests": float(seen.requests)}
    for name, values in (("pause_ack_ms", acks), ("load_ms", loads), ("stall_ms", seen.stalls(versions))):
        out |= {name: statistics.median(values), f"{name}_max": max(values)} if values else {}
    return out


def run(options: EngineOptions, folders: Sequence[Path], log: Path, *, pausing: bool = True) -> dict[str, float]:
    """Start the engine, measure, stop it."""
    server = start_engine(options, folders[0], Version(1, 0), log)
    try:
        asyncio.run(server.wait_ready())
        return asyncio.run(measure(server, folders, pausing=pausing))
    finally:
        asyncio.run(server.stop())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", type=Path, default=None, help="a Python interpreter that has SGLang")
    parser.add_argument("--hidden", type=int, default=256, help="the tiny model's width")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            make_tiny_model(
                Path(scratch) / f"model{seed}",
                layers=options.layers,
                hidden=options.hidden,
                intermediate=2 * options.hidden,
                max_length=1024,
                seed=seed,
            )
            for seed in range(2)
        ]
        for folder in folders:  # without an end token every request gets all its tokens
            for name in ("config.json", "generation_config.json"):
                path = folder / name
                path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
            path = folder / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
        log = Path(scratch) / "embedded.log"
        out = run(EngineOptions(max_running=32), folders, log)
        swapped = run(EngineOptions(max_running=32), folders, log, pausing=False)
        out |= {f"{name}_swap": value for name, value in swapped.items()}
        if options.sglang is not None:
            real = EngineOptions(kind="sglang", python=options.sglang, device="cpu", max_running=32)
            found = run(real, folders, Path(scratch) / "sglang.log")
            out |= {f"{name}_sglang": value for name, value in found.items()}
    print(json.dumps({key: round(value, 2) for key, value in out.items()}))


if __name__ == "__main__":
    main()
