"""How fast the durable pool is: put and take groups of 8 trajectories with 2,048 tokens, every change on disk.

    python examples/benchmarks/pool.py --groups 400

The last line is JSON: `groups_per_s` over put + take, `bytes_per_token` of the files on disk. `fsync_ms` is one
small durable write on the same disk, which bounds any such pool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentrl.rollout.pool import Pool
from agentrl.rollout.records import Ask, TakeRule
from agentrl.types import Context, Episode, Group, Sampled, Segment, Stop, Trajectory, Turn, Version

BATCH = 8
TRAJECTORIES = 8
TURNS = 4
TOKENS = 2048


def make_group(position: int, dice: np.random.Generator) -> Group:
    """Token ids as a tokenizer spreads them (few are frequent), log-probs with all their bits."""
    episodes = []
    for sample in range(TRAJECTORIES):
        segments = []
        for _ in range(TURNS):
            shown, said = TOKENS // TURNS // 4, TOKENS // TURNS - TOKENS // TURNS // 4
            segments.append(Segment(_tokens(dice, shown), None, Context()))
            logprobs = -dice.exponential(0.5, said).astype(np.float32)
            segments.append(Segment(_tokens(dice, said), logprobs, Sampled(Version(1, 0))))
        ends = np.cumsum([len(s) for s in segments])[1::2]
        turns = tuple(Turn(i, 0, int(end), float(sample % 2)) for i, end in enumerate(ends))
        row = {"question": "what is it?"}
        messages = tuple({"role": "user", "content": f"turn {i} " * 40} for i in range(2 * TURNS))
        trajectory = Trajectory(tuple(segments))
        episodes.append(Episode(position, sample, 0, 1, row, messages, turns, (trajectory,), Stop.FINISHED))
    return Group(position, 0, 0, "benchmark", tuple(episodes))


def _tokens(dice: np.random.Generator, n: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.minimum(dice.zipf(1.2, n), 150_000).astype(np.int32)


def at(group: Group, position: int) -> Group:
    """The same group at another position."""
    return replace(group, id=position, episodes=tuple(replace(e, group=position) for e in group.episodes))


async def measure(folder: Path, n: int) -> dict[str, float]:
    """Put `n` groups, take and fetch them in batches, and look at the files."""
    dice = np.random.default_rng(0)
    groups = [make_group(position, dice) for position in range(min(n, 64))]
    pool = await Pool.open(folder / "pool.sqlite")
    await pool.resume(Version(1, 0))
    await pool.start("benchmark")
    rule = TakeRule(batch=BATCH, staleness=4, wait=True, max_asks=3)
    put = took = 0.0

    async def finish(group: Group) -> None:
        pool.ask(Ask(group.id, 0))
        await pool.put(group)

    for step in range(n // BATCH):
        finished = [at(groups[p % len(groups)], p) for p in range(step * BATCH, step * BATCH + BATCH)]
        began = time.perf_counter()
        await asyncio.gather(*(finish(group) for group in finished))
        put += time.perf_counter() - began
        began = time.perf_counter()
        _, take = await pool.take(step, Version(1, 0), rule)
        assert take is not None
        assert len(take.bodies) == BATCH  # what the feed serves
        took += time.perf_counter() - began
    await pool.close()
    done = n // BATCH * BATCH
    size = await asyncio.to_thread(lambda: sum(file.stat().st_size for file in folder.iterdir()))
    return {
        "groups": done,
        "put_ms": 1e3 * put / done,
        "take_ms": 1e3 * took / done,
        "fsync_ms": _fsync_ms(folder),
        "bytes_per_token": size / (done * TRAJECTORIES * TOKENS),
        "groups_per_s": done / (put + took),
    }


def _fsync_ms(folder: Path) -> float:
    with (folder / "probe").open("wb") as file:
        began = time.perf_counter()
        for _ in range(50):
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    return 1e3 * (time.perf_counter() - began) / 50


def main() -> None:
    """Measure in a temporary folder and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--dir", type=Path, default=None, help="where the pool's files go (default: the temp folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), options.groups))))


if __name__ == "__main__":
    main()
