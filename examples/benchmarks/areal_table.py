"""The simulator against AReaL's published figures (arXiv 2505.24298): predicted from data sheets, nothing fitted.

    python examples/benchmarks/areal_table.py [--scale 16]

Hours of synchronous and asynchronous training, the same in tokens a second by η, and what interruption is worth, each
beside the published figure. The last line is JSON: predicted over published.

What the paper and its repository say: 8 H800 a node; 512 prompts × 16 answers a step; up to 27,648 tokens; 4
minibatches; 75 % of the devices generate; η = 4; synchronous runs generate on all devices, then train on all.
R1-Distill-Qwen models, math for 1.5B and 7B (1,000 steps, less than 5 % of the answers truncated), code for 14B and 32B
(80 and 60 steps, from memory of the paper).

What is assumed: the shares of the peak in `agentrl.simulate.presets`; answers lognormal, math median 6,000 and
σ 0.9 (4.5 % truncated), code of mean 13,000 and σ 0.7 (DeepCoder tells of 8,000 at the start and 17,500 at the end of
training); activations recomputed where those of the longest answer do not fit (all
but 1.5B); half of the variance of log-lengths between prompts; tensor parallelism 1, 1, 2, 4; 1 s to verify an answer,
10 s to run code.

The lengths of answers, which the paper does not tell, weigh most. Its own figures imply them for math: 49.0k tokens/s
on 8 devices at η = 4, on 16 nodes 16 times that for 14.8 h, over 1,000 × 8,192 answers, are 5,100 tokens an answer. The
math rows are predicted once more with that mean; this takes a published figure in and is listed apart, as `…_implied`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from agentrl.rollout.options import RolloutOptions
from agentrl.simulate.cost import Plan, Spread, Workload
from agentrl.simulate.presets import DEVICES, SHAPES, engine_cost, recomputes, train_cost
from agentrl.simulate.simulation import Report, simulate

LONGEST, PROMPTS, ANSWERS, MINIBATCHES = 27_648, 512, 16, 4
MATH = Workload(response=Spread(6000.0, 0.9, LONGEST), prompt=Spread(200.0), tool=Spread(1.0))
IMPLIED = Workload(
    response=Spread.lognormal(49.0e3 * 16 * 14.8 * 3600 / (1000 * 8192), 0.9, LONGEST),
    prompt=Spread(200.0),
    tool=Spread(1.0),
)
CODE = Workload(response=Spread.lognormal(13_000.0, 0.7, LONGEST), prompt=Spread(600.0), tool=Spread(10.0))


class Row(NamedTuple):
    """A row of the published table."""

    model: str
    nodes: int
    steps: int
    parallel: int
    work: Workload
    sync_hours: float
    async_hours: float


TABLE = (
    Row("qwen2.5-1.5b", 16, 1000, 1, MATH, 41.0, 14.8),
    Row("qwen2.5-7b", 24, 1000, 1, MATH, 57.7, 25.4),
    Row("qwen2.5-14b", 32, 80, 2, CODE, 48.8, 21.9),
    Row("qwen2.5-32b", 48, 60, 4, CODE, 51.1, 31.1),
)
BY_STALENESS = {0: 27.1e3, 1: 47.8e3, 2: 47.8e3, 4: 49.0e3, 8: 51.5e3, 16: 52.0e3}
INTERRUPTION = {"qwen2.5-1.5b": 0.12, "qwen2.5-7b": 0.17}
SPLIT = 0.75


def plan(model: str, work: Workload, *, engines: int, trainers: int, parallel: int) -> Plan:
    """Costs on H800s."""
    kind, form = DEVICES["h800"], SHAPES[model]
    again = recomputes(kind, form, longest=LONGEST, devices=trainers, parallel=parallel)
    return Plan(
        engines=engines // parallel,
        engine=engine_cost(kind, form, work, parallel=parallel, slots=1024),
        train=train_cost(kind, form, devices=trainers, minibatches=MINIBATCHES, recompute=again),
        work=work,
    )


def run(
    made: Plan, staleness: int, scale: int, steps: int, *, warmup: int | None = None, prompts: int = PROMPTS
) -> Report:
    """A simulated run of the real runner."""
    options = RolloutOptions(
        groups_per_step=prompts,
        samples=ANSWERS,
        staleness=staleness,
        max_turns=1,
        max_tokens=LONGEST,
        time_limit=36_000.0,
        filter_equal=False,
    )
    scale = max(k for k in range(1, scale + 1) if made.engines % k == 0 and prompts % k == 0)
    return simulate(made, options, steps=steps, warmup=warmup, scale=scale)


def hours(table: Sequence[Row], scale: int, steps: int, suffix: str = "") -> dict[str, float]:
    """The table of training hours."""
    ratios: dict[str, float] = {}
    print(f"model{suffix:10}nodes   sync h  published    async h  published   speed-up  published")
    for row in table:
        devices = 8 * row.nodes
        engines = round(SPLIT * devices)
        parted = plan(row.model, row.work, engines=engines, trainers=devices - engines, parallel=row.parallel)
        whole = plan(row.model, row.work, engines=devices, trainers=devices, parallel=row.parallel)
        asynchronous, synchronous = run(parted, 4, scale, steps), run(whole, 0, scale, steps)
        found = [r.step_seconds * row.steps / 3600 for r in (synchronous, asynchronous)]
        told = row.sync_hours / row.async_hours
        print(
            f"{row.model:14}  {row.nodes:3}  {found[0]:8.1f}  {row.sync_hours:9.1f}  {found[1]:9.1f}  "
            f"{row.async_hours:9.1f}  {found[0] / found[1]:8.2f}×  {told:8.2f}×   {describe(asynchronous)}",
            flush=True,
        )
        name = row.model.removeprefix("qwen2.5-") + suffix
        ratios[f"sync_hours_{name}"] = found[0] / row.sync_hours
        ratios[f"async_hours_{name}"] = found[1] / row.async_hours
        ratios[f"speedup_{name}"] = found[0] / found[1] / told
    return ratios


def by_staleness(scale: int, steps: int) -> dict[str, float]:
    """Tokens a second of the 1.5B model on 8 devices, with 510 prompts: 6 engines can then be simulated by one."""
    ratios = {}
    made = plan("qwen2.5-1.5b", MATH, engines=6, trainers=2, parallel=1)
    print("\nη    tokens/s  published")
    for staleness, published in BY_STALENESS.items():
        report = run(made, staleness, scale, max(2, steps // 2), warmup=2, prompts=510)
        print(f"{staleness:<3}  {report.tokens_per_second:8.0f}  {published:9.0f}   {describe(report)}", flush=True)
        ratios[f"tokens_per_s_eta_{staleness}"] = report.tokens_per_second / published
    return ratios


def interruption(scale: int, steps: int) -> dict[str, float]:
    """What it is worth that a publish need not wait for the longest answer, on 4 nodes."""
    gains = {}
    print("\nmodel          gain of interruption  published")
    for model, published in INTERRUPTION.items():
        made = plan(model, MATH, engines=24, trainers=8, parallel=1)
        with_it, without = run(made, 4, scale, steps), run(replace(made, interrupt=False), 4, scale, steps)
        gain = with_it.tokens_per_second / without.tokens_per_second - 1
        print(f"{model:14}  {100 * gain:18.1f} %  {100 * published:7.0f} %   {describe(without)}", flush=True)
        gains[f"interruption_gain_{model.removeprefix('qwen2.5-')}"] = gain
    return gains


def describe(report: Report) -> str:
    """Who waited for whom."""
    return (
        f"engines idle {100 * report.engine_idle:.0f} %, trainer waits {100 * report.trainer_idle:.0f} %, batch "
        f"{report.decode_batch:.0f}, staleness {report.staleness_mean:.1f}"
    )


def main() -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=32, help="simulate up to this fraction of each fleet")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    found = {
        **hours(TABLE, options.scale, options.steps),
        **by_staleness(options.scale, options.steps),
        **interruption(options.scale, options.steps),
        **hours([row._replace(work=IMPLIED) for row in TABLE[:2]], options.scale, options.steps, "_implied"),
    }
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
