"""The control plane beyond one process: rollout workers, publishing to many engines, and a host that is lost.

    python examples/benchmarks/scale.py                  # the three figures
    python examples/benchmarks/scale.py --episodes 8192  # also: so many at once, 64 engines, 4 rollout workers

Engines are scripted, but for the lost host, where all is real and tiny. Each host may send `--link` bytes a second, as
if it had a cable of its own: without that, publishing would measure this machine's memory. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agentrl.child import Child
from agentrl.cluster.fleet import RemoteFleet
from agentrl.cluster.hub import Hub
from agentrl.cluster.launcher import Players
from agentrl.cluster.options import ClusterOptions
from agentrl.cluster.scripted import ScriptedEngine
from agentrl.cluster.worker import Worker, WorkerOptions
from agentrl.conductor.config import RunConfig
from agentrl.conductor.desk import Desk, close_log, open_log
from agentrl.conductor.folder import RunFolder
from agentrl.conductor.meter import MeteredEngine
from agentrl.engine.options import EngineOptions
from agentrl.env import Env
from agentrl.monitor.live import make_view
from agentrl.monitor.metrics import MetricsFile, read_metrics
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.player import Sampling
from agentrl.testing.scripted_server import ScriptedServer
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Info, Message, Row, Step, Version

HERE = Path(__file__).resolve()
TOKEN = "of this benchmark alone"
TURNS = 5
CONFIG: dict[str, Any] = {
    "name": "scale",
    "env": {"path": f"{HERE}:Busy"},
    "rollout": {"max_turns": TURNS, "max_tokens": 512, "groups_per_step": 8, "samples": 8},
    "eval": {"every": 0},
    "cluster": {"rollout_workers": 1},
}
LOST = """
name = "lost"
model = "model"
[env]
path = "{here}:Busy"
args = {{ milliseconds = 0.0 }}
[rollout]
groups_per_step = 2
samples = 2
max_tokens = 24
filter_equal = false
[eval]
every = 0
[engine]
count = 2
[train]
steps = 100000
checkpoint_every = 1
[monitor]
trainer_restarts = 100
[cluster]
kind = "external"
port = {port}
"""


class Busy(Env):
    """Five turns, each with some milliseconds of Python."""

    def __init__(self, row: Row, *, milliseconds: float = 3.0) -> None:
        super().__init__(row)
        self.turn, self.seconds = 0, milliseconds / 1e3

    @classmethod
    def rows(cls, split: str, seed: int) -> list[Row]:
        """A thousand words."""
        return [{"word": f"{split} {i}"} for i in range(1000)]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The row's word."""
        return [{"role": "user", "content": self.row["word"]}], {}

    async def step(self, action: Message) -> Step:
        """Compute."""
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.turn += 1
        reward = len(str(action["content"] or "")) % 2 / TURNS
        return Step([{"role": "user", "content": "again"}], reward, self.turn == TURNS, False, {})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rollout measurement")
    parser.add_argument("--link", type=float, default=2.5e5, help="bytes a second that a host sends")
    parser.add_argument("--episodes", type=int, default=0, help="also play so many at once, on 64 engines")
    parser.add_argument("--only", choices=["rollouts", "publish", "lost", "many"])
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--delay", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve(options.serve, options.delay))
        return
    found: dict[str, Any] = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as place:
        model = make_tiny_model(Path(place) / "model")
        if options.only in (None, "rollouts"):
            found |= asyncio.run(measure_rollouts(Path(place), model, options.seconds))
        if options.only in (None, "publish"):
            found |= asyncio.run(measure_publish(Path(place), model, options.link))
        if options.only in (None, "lost"):
            found |= measure_lost_host(Path(place), model)
        if options.episodes:
            found |= asyncio.run(measure_many(Path(place), model, options.episodes))
    print(json.dumps(found))


# --- turns by the number of rollout workers


async def _serve(count: int, delay: float) -> None:
    tokens = 1 if delay else 8
    servers = [ScriptedServer(lambda prompt: [65 + len(prompt) % 2] * tokens, token_delay=delay) for _ in range(count)]
    for server in servers:
        await server.start()
    print(*(server.url for server in servers), flush=True)
    while True:
        await asyncio.sleep(0.5)
        print(sum(len(server.running) for server in servers), flush=True)


@contextmanager
def _engines(count: int, delay: float = 0.0) -> Iterator[tuple[list[str], Callable[[], int]]]:
    """Scripted engines in a process of their own: addresses, and what says how many requests run."""
    argv = [sys.executable, str(HERE), "--serve", str(count), "--delay", str(delay)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        urls, running = process.stdout.readline().split(), [0]
        stream = process.stdout
        threading.Thread(target=lambda: running.extend(int(line) for line in stream), daemon=True).start()
        yield urls, lambda: max(running)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def _desk(folder: Path) -> AsyncIterator[Desk]:
    run = RunFolder(folder)
    run.open(resume=False)
    desk = Desk(run, MetricsFile(run.metrics), make_view("scale", 1), open_log(run))
    try:
        yield desk
    finally:
        desk.metrics.close()
        close_log(desk.log)
        run.close()


@asynccontextmanager
async def _players(place: Path, model: Path, workers: int, urls: Sequence[str], **env: float) -> AsyncIterator[Players]:
    settings = {**CONFIG, "model": str(model), "env": {**CONFIG["env"], "args": env}}
    async with _desk(place) as desk:
        hub = Hub(ClusterOptions(kind="external", port=0, lost_seconds=60), TOKEN, run="scale", note=desk.log.info)
        players = Players(RunConfig.model_validate(settings), desk, hub)
        await hub.start({"/rollout": players.rollouts.application()})
        players.share_template()
        argv = [sys.executable, "-m", "agentrl.cli", "worker", "--role", "rollout", "--conductor", hub.url]
        env_of = {"AGENTRL_CLUSTER_TOKEN": TOKEN}
        children = [
            Child(f"worker {i}", [*argv, "--name", str(i)], log=place / f"worker-{i}.log", env=env_of)
            for i in range(workers)
        ]
        players.open(MeteredEngine(_Nobody()), lambda: urls)
        tasks = [asyncio.create_task(hub.run()), asyncio.create_task(players.rollouts.run())]
        try:
            while players.rollouts.workers < workers:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            yield players
        finally:
            for task in tasks:
                task.cancel()
            await hub.stop()
            await asyncio.gather(*(child.stop() for child in children))


class _Nobody:
    """The conductor itself samples nothing here."""

    async def generate(self, request: Any, on_tokens: Any = None) -> Any:
        raise AssertionError("episodes are played by workers")


async def _turns_per_second(players: Players, seconds: float, at_once: int) -> float:
    turns, started = 0, 0
    end = time.monotonic() + seconds + 2.0
    begin = time.monotonic() + 2.0  # the first two seconds are warm-up

    async def play_on() -> None:
        nonlocal turns, started
        while time.monotonic() < end:
            started += 1
            spec = EpisodeSpec(started, 0, 0, started, {"word": str(started)})
            outcome = await players.rollouts.play(spec, Sampling("s", started, True, 1.0))
            assert outcome.episode.scored, outcome.episode.error
            if begin <= time.monotonic() <= end:
                turns += TURNS

    await asyncio.gather(*(play_on() for _ in range(at_once)))
    return turns / seconds


async def measure_rollouts(place: Path, model: Path, seconds: float) -> dict[str, Any]:
    """Turns a second with one worker and with two."""
    rates = {}
    for workers in (1, 2):
        with _engines(1) as (urls, _):
            async with _players(place / f"rollouts-{workers}", model, workers, urls) as players:
                rates[workers] = await _turns_per_second(players, seconds, 64)
        print(f"{workers} rollout worker(s): {rates[workers]:.0f} turns/s", flush=True)
    return {
        "turns_per_s_1_worker": round(rates[1], 1),
        "turns_per_s_2_workers": round(rates[2], 1),
        "turns_per_s_2_workers_over_1": round(rates[2] / rates[1], 2),
    }


# --- publishing


async def _publish_seconds(place: Path, model: Path, engines: int, link: float) -> float:
    async with _desk(place / "run") as desk:
        options = ClusterOptions(kind="external", port=0, lost_seconds=60.0, slow_seconds=300.0)
        hub = Hub(options, TOKEN, run="scale", note=desk.log.info)
        await hub.start({})

        async def bring(path: Path, version: Version) -> None:
            """It is here already."""

        fleet = RemoteFleet(
            EngineOptions(count=engines), model, desk, hub, restarts=3, silent_seconds=600.0, bring=bring
        )
        workers = []
        for number in range(engines):
            folder = place / f"host-{number}"
            folder.mkdir()
            told = WorkerOptions("engine", hub.url, TOKEN, name=str(number))
            workers.append(Worker(told, folder, make_engine=ScriptedEngine))
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        watching = asyncio.create_task(hub.run())
        await fleet.start(model, Version(1, 0))
        for shelf in (hub.shelf, *(worker.shelf for worker in workers)):
            shelf.bytes_per_second = link
        seconds = []
        for number in (1, 2):
            folder = place / f"weights-{number}"
            make_tiny_model(folder, seed=number)
            begin = time.monotonic()
            report = await fleet.publish(folder, Version(1, number))
            seconds.append(time.monotonic() - begin)
            assert len(report.updated) == engines, report.failed
        watching.cancel()
        await fleet.stop()
        for worker in workers:
            worker.stop()
        await asyncio.gather(*tasks)
        await hub.stop()
        return min(seconds)


async def measure_publish(place: Path, model: Path, link: float) -> dict[str, Any]:
    """Seconds of a publish to 1, 8 and 64 engines."""
    seconds = {}
    for engines in (1, 8, 64):
        folder = place / f"publish-{engines}"
        folder.mkdir()
        seconds[engines] = await _publish_seconds(folder, model, engines, link)
        print(f"publish to {engines} engine(s): {seconds[engines]:.2f} s", flush=True)
    return {
        **{f"publish_s_{engines}_engines": round(value, 2) for engines, value in seconds.items()},
        "publish_64_over_8_engines": round(seconds[64] / seconds[8], 2),
    }


# --- a host that is lost


def measure_lost_host(place: Path, model: Path) -> dict[str, Any]:
    """Seconds from the end of a host, with the trainer's rank and an engine on it, to the next step elsewhere."""
    folder = place / "lost"
    folder.mkdir()
    (folder / "model").symlink_to(model)
    port = _free_port()
    (folder / "run.toml").write_text(LOST.format(here=HERE, port=port))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AGENTRL_CLUSTER_TOKEN": TOKEN}
    started: list[subprocess.Popen[bytes]] = []

    def start(title: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (folder / f"{title}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.cli", *arguments],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process

    try:
        start("conductor", "train", "run.toml")
        url = f"http://127.0.0.1:{port}"
        hosts = {
            (host, role): start(f"{host}-{role}", "worker", "--role", role, "--conductor", url, "--name", host)
            for host in "ab"
            for role in ("engine", "trainer")
        }
        metrics = folder / "runs" / "lost" / "metrics.jsonl"
        _wait(lambda: _steps(metrics) and _steps(metrics)[-1]["step"] >= 3, folder)
        (host,) = [h for h in "ab" if "starts trainer" in (folder / f"{h}-trainer.log").read_text()]
        for role in ("engine", "trainer"):
            os.killpg(hosts[host, role].pid, signal.SIGKILL)  # its children follow: they hold a pipe to it
        begin = time.monotonic()
        incarnation = _steps(metrics)[-1]["version"].partition(".")[0]
        _wait(lambda: _steps(metrics)[-1]["version"].partition(".")[0] != incarnation, folder)
        seconds = time.monotonic() - begin
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"a step {seconds:.1f} s after the host was lost", flush=True)
    return {"recovery_s_host_lost": round(seconds, 1)}


def _steps(metrics: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(metrics) if line["kind"] == "step"]


def _wait(what: Any, folder: Path) -> None:
    end = time.monotonic() + 300
    while not what():
        assert time.monotonic() < end, (folder / "conductor.log").read_text()[-3000:]
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- many at once


async def measure_many(place: Path, model: Path, episodes: int) -> dict[str, Any]:
    """So many episodes at once over 4 rollout workers and 64 engines: how many were under way, and how many scored."""
    with ExitStack() as stack:
        engines = [stack.enter_context(_engines(16, delay=30.0)) for _ in range(4)]
        urls = [url for some, _ in engines for url in some]
        async with _players(place / "many", model, 4, urls, milliseconds=0.0) as players:
            begin = time.monotonic()
            specs = [EpisodeSpec(i, 0, 0, i, {"word": str(i)}) for i in range(episodes)]
            playing = [players.rollouts.play(spec, Sampling("m", spec.seed, True, 1.0)) for spec in specs]
            outcomes = await asyncio.gather(*playing)
            seconds = time.monotonic() - begin
        most = sum(running() for _, running in engines)
    scored = sum(outcome.episode.scored for outcome in outcomes)
    print(f"{episodes} episodes in {seconds:.0f} s, {most} requests at once at the engines", flush=True)
    return {"episodes": episodes, "episodes_scored": scored, "requests_at_once": most, "episodes_s": round(seconds, 1)}


if __name__ == "__main__":
    main()
