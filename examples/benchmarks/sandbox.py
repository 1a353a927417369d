"""How fast warm boxes run programs, against a fresh container for each.

    python examples/benchmarks/sandbox.py                  # needs bubblewrap, busybox and DOCKER_HOST (.ci/docker.sh)
    python examples/benchmarks/sandbox.py --without-docker # bubblewrap only

Each program is `python3 -c "print(1)"`: a box is taken from the pool, runs it, is cleaned and given back. The last line
is JSON; `bwrap_warm_per_s` and `fresh_container_per_s` are the best of the tried concurrencies, `docker_warm_per_s` is
at concurrency 8, `*_p50_ms` at 1, and `ratio_vs_fresh_container` the smaller of the two ratios to fresh containers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

from agentrl.sandbox import SandboxOptions, open_sandbox
from agentrl.sandbox.pool import Pool

ARGV = ["python3", "-c", "print(1)"]


async def at_concurrency(run: Callable[[], Awaitable[None]], workers: int, count: int) -> tuple[float, float]:
    """Programs a second, and the median of their times in ms."""
    times: list[float] = []

    async def work() -> None:
        for _ in range(count // workers):
            started = time.perf_counter()
            await run()
            times.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(workers)))
    return len(times) / (time.perf_counter() - started), statistics.median(times) * 1000


async def warm(pool: Pool, name: str, tried: tuple[int, ...], count: int) -> dict[str, float]:
    """Figures of one kind of warm box."""

    async def run() -> None:
        async with pool.box() as box:
            done = await box.exec(ARGV)
            assert done.stdout == b"1\n", done

    await pool.warm()
    await at_concurrency(run, 1, 20)
    figures = {}
    for workers in tried:
        per_s, p50 = await at_concurrency(run, workers, count)
        print(f"{name}: {workers} at once: {per_s:.0f}/s, median {p50:.1f} ms", flush=True)
        figures[f"{name}_warm_per_s_at_{workers}"] = round(per_s, 1)
        if workers == 1:
            figures[f"{name}_warm_p50_ms"] = round(p50, 2)
    figures[f"{name}_warm_per_s"] = max(v for k, v in figures.items() if "_per_s_at_" in k)
    return figures


async def fresh(image: str, url: str, count: int) -> dict[str, float]:
    """Figures of a fresh container a program, with the same limits on network and memory."""
    import docker

    client = docker.DockerClient(base_url=url, max_pool_size=16) if url else docker.from_env(max_pool_size=16)

    def container() -> None:
        out = client.containers.run(image, ARGV, network_mode="none", mem_limit="512m", pids_limit=64, remove=True)
        assert out == b"1\n", out

    figures = {}
    for workers in (1, 4):
        per_s, p50 = await at_concurrency(lambda: asyncio.to_thread(container), workers, count)
        print(f"fresh containers: {workers} at once: {per_s:.1f}/s, median {p50:.0f} ms", flush=True)
        figures[f"fresh_container_per_s_at_{workers}"] = round(per_s, 2)
    client.close()
    return figures | {"fresh_container_per_s": max(figures.values())}


async def measure(count: int, docker_url: str | None) -> dict[str, float]:
    """All figures, one kind after the other."""
    async with open_sandbox(SandboxOptions(kind="bubblewrap", slots=8)) as pool:
        figures = await warm(pool, "bwrap", (1, 2, 4, 8), count)
    if docker_url is None:
        return figures
    from agentrl.sandbox.rootfs import build_rootfs
    from agentrl.sandboxes.docker import REPOSITORY

    options = SandboxOptions(kind="docker", slots=8, docker_url=docker_url)
    async with open_sandbox(options) as pool:
        figures |= await warm(pool, "docker", (1, 8), count)
        figures["docker_warm_per_s"] = figures["docker_warm_per_s_at_8"]
        figures |= await fresh(f"{REPOSITORY}:{build_rootfs().name}", docker_url, max(8, count // 20))
    for name in ("bwrap", "docker"):
        figures[f"{name}_ratio"] = round(figures[f"{name}_warm_per_s"] / figures["fresh_container_per_s"], 1)
    return figures | {"ratio_vs_fresh_container": min(figures["bwrap_ratio"], figures["docker_ratio"])}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=600, help="programs a measurement")
    parser.add_argument("--docker-url", default="", help="the engine; else DOCKER_HOST")
    parser.add_argument("--without-docker", action="store_true")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.count, None if args.without_docker else args.docker_url))))


if __name__ == "__main__":
    main()
