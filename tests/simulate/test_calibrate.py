"""Costs come back from the metrics and the pool of a run that has them, and the run is then predicted."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from agentrl.conductor.config import RunConfig
from agentrl.config import load, to_toml
from agentrl.errors import ConfigError
from agentrl.monitor.metrics import MetricsFile, read_metrics
from agentrl.rollout.pool import Pool
from agentrl.rollout.records import Ask
from agentrl.simulate.calibrate import LEAST_SHARE, WARM_UP, calibrate, workload
from agentrl.simulate.cost import Plan
from agentrl.simulate.simulation import simulate
from agentrl.testing.clock import run_virtual
from agentrl.types import Context, Episode, Group, Sampled, Segment, Stop, Trajectory, Turn, Version

STEP, SEQUENCE, REQUEST, STALL, FIXED, TOKEN = 0.004, 0.0002, 0.003, 0.25, 0.5, 1e-4
GROUP = 0.02


def context(n: int) -> Segment:
    return Segment(np.zeros(n, np.int32), None, Context())


def sampled(n: int) -> Segment:
    return Segment(np.ones(n, np.int32), np.full(n, -0.5, np.float32), Sampled(Version(1, 0)))


def episode(group: int, sample: int, lengths: list[int]) -> Episode:
    """A prompt of 20 tokens, answers of these lengths, observations of 7."""
    segments, turns, at = [context(20)], [], 20
    for index, length in enumerate(lengths):
        if index:
            segments.append(context(7))
            at += 7
        segments.append(sampled(length))
        at += length
        turns.append(Turn(index, 0, at, float(index == len(lengths) - 1)))
    return Episode(
        group=group,
        sample=sample,
        attempt=0,
        seed=0,
        row={},
        messages=(),
        turns=tuple(turns),
        trajectories=(Trajectory(tuple(segments)),),
        stop=Stop.FINISHED,
        metrics={"env_step_s": 0.2 * len(lengths)},
    )


def group(position: int, lengths: list[list[int]]) -> Group:
    return Group(position, 0, 0, "made", tuple(episode(position, k, ls) for k, ls in enumerate(lengths)))


def test_episodes_are_read_off_their_turns() -> None:
    work = workload([group(0, [[30, 5], [40]]), group(1, [[10], [20, 3]])], 0.25)
    assert work.prompt.values == (20.0,) * 4
    assert sorted(work.response.values) == [3.0, 5.0, 10.0, 20.0, 30.0, 40.0]
    assert work.turns.values == (1.0, 1.0, 2.0, 2.0)
    assert work.observation.values == (7.0, 7.0)
    assert work.tool.values == pytest.approx((0.2,) * 4)
    assert work.equal_share == 0.25


def test_lengths_that_differ_by_row_only_have_all_their_variance_there() -> None:
    by_row = [group(i, [[n], [n], [n]]) for i, n in enumerate((10, 20, 40, 80))]
    assert workload(by_row, 0.0).row_share == pytest.approx(1.0)
    draw = random.Random(0)
    alike = [group(i, [[draw.randint(1, 100)] for _ in range(8)]) for i in range(40)]
    assert workload(alike, 0.0).row_share < 0.15


def step_line(step: int, time: float, draw: random.Random, in_line: float) -> tuple[dict[str, Any], float]:
    """A step whose window has the costs above, to the letter, and when it ends."""
    batch = draw.uniform(8, 60)
    tokens, idle = draw.uniform(2000, 4000), draw.uniform(0.0, 1.0)
    requests = tokens / draw.uniform(10, 40)
    busy = STEP * tokens / batch + SEQUENCE * tokens + REQUEST * requests
    seconds = busy + STALL + idle
    in_flight = batch * (seconds - idle) / seconds
    fetch = 4 * GROUP * (1 + in_line * in_flight)
    packed = draw.uniform(4000, 8000)
    line = {
        "step": step,
        "engine/idle_share": idle / seconds,
        "rollout/tokens_per_second": tokens / seconds,
        "engine/requests_per_second": requests / seconds,
        "engine/in_flight_mean": in_flight,
        "rollout/groups_pooled": 6.0,
        "rollout/groups_filtered": 2.0,
        "seconds/step": FIXED + TOKEN * packed + 0.75 + fetch,
        "seconds/fetch": fetch,
        "seconds/take": 0.5,
        "seconds/weights": 0.25,
        "tokens/packed": packed,
        "tokens/trained": packed / 2,
        "staleness/mean": 1.5,
    }
    return line, time + seconds


def made_run(folder: Path, steps: int, drop: str = "", staleness: int = 0) -> Path:
    small = ["rollout.groups_per_step=4", "rollout.samples=4", f"rollout.staleness={staleness}"]
    config = load(RunConfig, None, [f"name={folder.name}", f"model={folder}", "env.path=made:Up", *small])
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    metrics, draw, time = MetricsFile(folder / "metrics.jsonl"), random.Random(1), 0.0
    for step in range(1, steps + 1):
        line, time = step_line(step, time, draw, in_line=float(staleness > 0))
        line.pop(drop, None)
        metrics.write("publish", {"step": step, "publish/stall_ms": 1e3 * STALL})
        metrics.write("step", {**line, "time": time})
    metrics.close()
    run_virtual(fill_pool(folder / "pool.sqlite"))
    return folder


async def fill_pool(path: Path) -> None:
    pool = await Pool.open(path)
    await pool.resume(Version(1, 0))
    for position in range(8):
        pool.ask(Ask(position, 0))
        assert await pool.put(group(position, [[20 + position], [30, 10]]))
    await pool.close()


def test_the_costs_of_a_run_come_back_and_predict_it(tmp_path: Path) -> None:
    found = calibrate(made_run(tmp_path / "x", 30))
    engine, train = found.engine, found.train
    assert (engine.step, engine.sequence, engine.request) == pytest.approx((STEP, SEQUENCE, REQUEST), rel=0.02)
    assert engine.load == pytest.approx(STALL)
    assert (train.fixed, train.token, train.hand_over) == pytest.approx((FIXED, TOKEN, 0.25), rel=0.02)
    assert found.conductor.group == pytest.approx(GROUP)
    assert found.trainer(4).token == pytest.approx(TOKEN / 4, rel=0.02)
    assert found.work.equal_share == 0.25
    assert found.measured.staleness_mean == pytest.approx(1.5)
    options = load(RunConfig, tmp_path / "x" / "config.toml").rollout
    report = simulate(Plan(1, engine, train, found.work), options, steps=2)
    assert report.episode_tokens == pytest.approx(found.work.sampled + 20 + 3.5, rel=0.25)


def test_slow_fetches_tell_that_the_conductor_is_what_everything_waits_for(tmp_path: Path) -> None:
    found = calibrate(made_run(tmp_path / "x", 30, staleness=1))
    lines = [line for line in read_metrics(tmp_path / "x" / "metrics.jsonl") if line["kind"] == "step"][WARM_UP:]
    calls = fmean(line["engine/requests_per_second"] / (1 - line["engine/idle_share"]) for line in lines)
    assert found.conductor.group == pytest.approx(GROUP)
    assert found.conductor.request == pytest.approx(1 / calls, rel=0.05)
    assert found.engine.step == pytest.approx(LEAST_SHARE * STEP, rel=0.02)


@pytest.mark.parametrize(
    ("steps", "drop", "said"),
    [(WARM_UP + 1, "", "are needed"), (30, "engine/in_flight_mean", "older agentrl")],
)
def test_what_cannot_be_calibrated_with_is_said(tmp_path: Path, steps: int, drop: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        calibrate(made_run(tmp_path / "x", steps, drop))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        calibrate(tmp_path)
