"""The simulator against what can be worked out by hand: engines, whole runs, searches, costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import load
from agentrl.errors import ConfigError
from agentrl.rollout.options import RolloutOptions
from agentrl.simulate.cost import ConductorCost, EngineCost, Plan, Spread, TrainCost, Workload
from agentrl.simulate.engine import Fleet, VirtualEngine
from agentrl.simulate.options import SimulateConfig
from agentrl.simulate.presets import DEVICES, SHAPES, engine_cost, recomputes, shape, train_cost
from agentrl.simulate.search import fitting_scale, search
from agentrl.simulate.show import draw, run_simulate
from agentrl.simulate.simulation import simulate
from agentrl.testing.clock import run_virtual
from agentrl.types import Version

COST = EngineCost(step=0.01, sequence=0.001, prefill=0.0001, slots=4, load=2.0)
FIRST, SECOND = Version(1, 0), Version(1, 1)


def in_engine(cost: EngineCost, body: Callable[[VirtualEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(VirtualEngine(cost, FIRST))

    run_virtual(main())


def now() -> float:
    return asyncio.get_running_loop().time()


# --- engines


def test_one_sequence_takes_its_prefill_and_its_steps() -> None:
    async def body(engine: VirtualEngine) -> None:
        assert await engine.generate(context=1000, fresh=500, tokens=100) == [(FIRST, 100)]
        assert now() == pytest.approx(500 * 0.0001 + 100 * 0.011)

    in_engine(COST, body)


def test_sequences_decode_in_step_and_more_than_fit_wait() -> None:
    async def body(engine: VirtualEngine) -> None:
        ends: list[float] = []

        async def one(tokens: int) -> None:
            await engine.generate(context=0, fresh=0, tokens=tokens)
            ends.append(now())

        await asyncio.gather(*(one(tokens) for tokens in (100, 100, 100, 200, 50)))
        together = 100 * 0.014  # four at once; the fifth takes a place that became free
        beside = 50 * 0.012
        assert ends == pytest.approx([together] * 3 + [together + beside, together + beside + 50 * 0.011])
        gauge = engine.measure()
        assert gauge.tokens == pytest.approx(550)
        assert gauge.waiting == pytest.approx(together)

    in_engine(COST, body)


def test_a_publish_stops_every_sequence_at_a_token_and_reads_the_contexts_again() -> None:
    async def body(engine: VirtualEngine) -> None:
        running = asyncio.ensure_future(engine.generate(context=300, fresh=0, tokens=100))
        await asyncio.sleep(40 * 0.011)
        engine.pause()
        await asyncio.sleep(2.0)
        engine.resume(SECOND)
        assert await running == [(FIRST, 40), (SECOND, 60)]
        assert now() == pytest.approx(100 * 0.011 + 2.0 + 340 * 0.0001)
        assert engine.measure().paused == pytest.approx(2.0)

    in_engine(COST, body)


def test_without_interruption_a_publish_waits_for_what_runs_and_admits_nothing() -> None:
    async def main() -> None:
        fleet = Fleet(2, COST, FIRST, interrupt=False)
        running = asyncio.ensure_future(fleet.engines[0].generate(context=0, fresh=0, tokens=100))
        await asyncio.sleep(0.1)
        publishing = asyncio.ensure_future(fleet.publish(Path(), SECOND))
        await asyncio.sleep(0.1)
        late = asyncio.ensure_future(fleet.engines[1].generate(context=0, fresh=0, tokens=10))
        await publishing
        assert running.done()
        assert now() == pytest.approx(100 * 0.011 + 2.0)
        assert await running == [(FIRST, 100)]
        assert await late == [(SECOND, 10)]

    run_virtual(main())


def test_a_cancelled_request_leaves_its_place_at_once() -> None:
    async def body(engine: VirtualEngine) -> None:
        first = [asyncio.ensure_future(engine.generate(context=0, fresh=0, tokens=1000)) for _ in range(4)]
        waiting = asyncio.ensure_future(engine.generate(context=0, fresh=0, tokens=10))
        also = asyncio.ensure_future(engine.generate(context=0, fresh=0, tokens=10))
        await asyncio.sleep(0.5)
        for gone in (*first, also):
            gone.cancel()
        await waiting
        assert now() == pytest.approx(0.5 + 10 * 0.011)
        assert engine.in_flight == 0
        await asyncio.sleep(1.0)
        assert engine.measure().idle == pytest.approx(1.0)

    in_engine(COST, body)


def test_new_sessions_go_where_least_is_in_flight() -> None:
    async def main() -> None:
        fleet = Fleet(3, COST, FIRST, interrupt=True)
        assert len({id(fleet.assign()) for _ in range(3)}) == 3

    run_virtual(main())


# --- whole runs


def plan(**changes: object) -> Plan:
    made = Plan(
        engines=2,
        engine=EngineCost(step=0.01, sequence=0.0, slots=64, load=0.0, recompute=False),
        train=TrainCost(fixed=1.0, token=0.0),
        work=Workload(response=Spread(100.0), prompt=Spread(10.0)),
        conductor=ConductorCost(0.0, 0.0),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def rollout(**changes: object) -> RolloutOptions:
    return RolloutOptions.model_validate(
        {"groups_per_step": 4, "samples": 4, "staleness": 0, "filter_equal": False, **changes}
    )


def test_a_synchronous_step_is_generation_then_training() -> None:
    report = simulate(plan(), rollout(), steps=4)
    assert report.step_seconds == pytest.approx(100 * 0.01 + 1.0)
    assert report.tokens_per_second == pytest.approx(16 * 100 / 2.0)
    assert report.engine_idle == pytest.approx(0.5)
    assert report.trainer_idle == pytest.approx(0.5)
    assert (report.staleness_mean, report.staleness_max) == (0.0, 0)
    assert report.episode_tokens == pytest.approx(110)


def test_an_asynchronous_run_is_as_fast_as_its_slower_side() -> None:
    slow_trainer = simulate(plan(train=TrainCost(fixed=3.0, token=0.0)), rollout(staleness=2), steps=6)
    assert slow_trainer.step_seconds == pytest.approx(3.0)
    assert slow_trainer.trainer_idle == pytest.approx(0.0)
    slow_engines = simulate(plan(train=TrainCost(fixed=0.1, token=0.0)), rollout(staleness=2), steps=8)
    # Three batches live at once on engines whose pace does not depend on how much they hold.
    assert slow_engines.tokens_per_second == pytest.approx(3 * 16 * 100 / (100 * 0.01), rel=0.12)
    assert slow_engines.staleness_max <= 2


def test_the_conductor_s_time_is_shared_by_all_that_is_under_way() -> None:
    made = plan(conductor=ConductorCost(request=0.1, group=0.5))
    report = simulate(made, rollout(), steps=2)
    assert report.conductor_busy == pytest.approx((16 * 0.1 + 4 * 0.5) / report.step_seconds)
    # Sixteen calls begin at once and end together; the trainer then fetches four groups, alone.
    assert report.step_seconds == pytest.approx(16 * 0.1 + 1.0 + 4 * 0.5 + 1.0)
    assert simulate(made, rollout(), steps=2, scale=2).step_seconds == pytest.approx(report.step_seconds)
    # Calls that go on meanwhile slow the fetches down.
    assert simulate(made, rollout(staleness=2), steps=2).train_seconds > 4 * 0.5 + 1.0 + 0.5


def test_the_bound_holds_and_the_result_is_the_same_again() -> None:
    made = plan(work=Workload(response=Spread.lognormal(100.0, 1.0, 1000.0), prompt=Spread(10.0), tool=Spread(0.5)))
    first, again = (simulate(made, rollout(staleness=1), steps=5) for _ in range(2))
    assert first == again
    assert 0 < first.staleness_mean <= first.staleness_max <= 1
    assert first != simulate(made, rollout(staleness=1), steps=5, seed=1)


def test_turns_observations_tools_limits_and_filtered_groups() -> None:
    work = Workload(
        response=Spread(40.0),
        prompt=Spread(10.0),
        turns=Spread(3.0),
        observation=Spread(5.0),
        tool=Spread(2.0),
        equal_share=0.5,
    )
    report = simulate(plan(work=work), rollout(filter_equal=True), steps=4)
    assert report.episode_tokens == pytest.approx(10 + 3 * 40 + 2 * 5)
    assert report.fates["filtered"] == pytest.approx(4, abs=3)
    assert report.step_seconds > 3 * (0.4 + 2.0)
    cut = simulate(plan(work=work), rollout(max_tokens=80), steps=1)
    assert cut.stops == {"max_tokens": 1.0}
    assert cut.episode_tokens == pytest.approx(10 + 80 + 5)
    late = simulate(plan(work=work), rollout(time_limit=5.0), steps=1)
    assert late.stops == {"time_limit": 1.0}


def test_a_part_of_a_run_tells_of_the_whole() -> None:
    made = plan(
        engines=4,
        engine=EngineCost(step=0.01, sequence=0.001, slots=64, load=0.3, prefill=1e-4),
        train=TrainCost(fixed=0.2, token=1e-4),
        work=Workload(response=Spread.lognormal(100.0, 0.6, 500.0), prompt=Spread(10.0)),
    )
    options = rollout(groups_per_step=16, staleness=1)
    whole, part = simulate(made, options, steps=4), simulate(made, options, steps=4, scale=4)
    assert part.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=0.15)
    assert part.staleness_mean == pytest.approx(whole.staleness_mean, abs=0.35)
    with pytest.raises(ValueError, match="must divide"):
        simulate(made, options, scale=3)


def test_interruption_is_worth_something_where_lengths_differ() -> None:
    work = Workload(response=Spread.lognormal(200.0, 1.0, 2000.0), prompt=Spread(10.0))
    made = plan(work=work, train=TrainCost(fixed=2.0, token=0.0))
    with_it, without = (
        simulate(replace(made, interrupt=interrupt), rollout(staleness=4), steps=6) for interrupt in (True, False)
    )
    assert with_it.several_versions > 0
    assert without.several_versions == 0
    assert with_it.tokens_per_second > without.tokens_per_second


# --- costs


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-8b"])
def test_a_config_json_has_the_shape_of_its_preset(name: str, tmp_path: Path) -> None:
    configs = {
        "qwen2.5-7b": {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
        "qwen3-8b": {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12288,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(configs[name]))
    found = shape(None, tmp_path)
    assert found.parameters == pytest.approx(SHAPES[name].parameters, rel=0.01)
    assert replace(found, parameters=0.0) == replace(SHAPES[name], parameters=0.0)


def test_costs_of_a_7b_model_on_an_h100_are_of_the_right_size() -> None:
    kind, form = DEVICES["h100"], SHAPES["qwen2.5-7b"]
    work = Workload(response=Spread(2000.0), prompt=Spread(500.0))
    cost = engine_cost(kind, form, work, parallel=1, slots=1024)
    # One sequence is bound by reading 15 GB of weights at 80 % of 3.35 TB/s.
    assert cost.decode(1, 0) == pytest.approx(15.24e9 / 2.68e12 + 2e-3, rel=0.02)
    assert cost.slots == int((0.85 * 80e9 - 15.24e9) / (form.kv_bytes * 1500))
    assert train_cost(kind, form, devices=8, minibatches=1, recompute=False).token == pytest.approx(
        6 * form.parameters / (8 * 0.4 * 989e12)
    )
    with pytest.raises(ConfigError, match="raise engine"):
        engine_cost(kind, SHAPES["qwen2.5-72b"], work, parallel=1, slots=64)


def test_a_spread_has_the_mean_it_was_given_and_measured_values_come_back() -> None:
    mean, _ = Spread.lognormal(100.0, 0.5).moments()
    assert mean == pytest.approx(100.0, rel=0.01)
    seen = Spread.measured([1.0, 2.0, 2.0, 10.0])
    assert {seen.at(z) for z in (-3.0, -0.1, 0.1, 3.0)} == {1.0, 2.0, 10.0}
    assert seen.moments()[0] == pytest.approx(3.75)


# --- the command

TOML = """
name = "sized"
model = "MODEL"
[env]
path = "agentrl.envs.calculator:Calculator"
[rollout]
groups_per_step = 4
samples = 4
staleness = 1
max_turns = 1
max_tokens = 512
[engine]
kind = "sglang"
[simulate]
gpus = 8
shares = [0.5, 0.75]
model = "qwen2.5-1.5b"
steps = 1
"""


def configured(tmp_path: Path, **simulated: object) -> SimulateConfig:
    path = tmp_path / "run.toml"
    path.write_text(TOML.replace("MODEL", str(tmp_path)))
    return load(SimulateConfig, path, [f"simulate.{key}={json.dumps(value)}" for key, value in simulated.items()])


def test_the_best_split_and_the_smallest_staleness_that_is_as_good(tmp_path: Path) -> None:
    found = search(configured(tmp_path))
    assert [(trial.engines, trial.ranks) for trial in found.splits] == [(4, 4), (6, 2)]
    assert [trial.staleness for trial in found.ages] == [0, 1]
    most = max(trial.report.tokens_per_second for trial in found.ages)
    assert found.best.report.tokens_per_second >= 0.98 * most
    assert all(t.report.tokens_per_second < 0.98 * most for t in found.ages if t.staleness < found.best.staleness)
    draw(found, tmp_path / "sim.png")
    assert (tmp_path / "sim.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_tells_sources_trials_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configured(tmp_path)
    run_simulate(tmp_path / "run.toml", ["simulate.hardware=h200", "simulate.shares=[0.5]"], None, None)
    told = capsys.readouterr().out
    assert "costs of h200 from its data sheet, 1.54 billion parameters" in told
    assert "best: " in told
    assert "tokens/s" in told


def test_settings_without_effect_and_unknown_names_are_refused(tmp_path: Path) -> None:
    for wrong, said in (
        ({"hardware": "abacus"}, "none of a100"),
        ({"model": "gpt-2"}, "none of qwen"),
        ({"shares": [1.5]}, "between 0 and 1"),
        ({"staleness": []}, "at least one"),
    ):
        with pytest.raises(ConfigError, match=said):
            search(configured(tmp_path, **wrong))


def test_the_scale_leaves_enough_episodes() -> None:
    options = rollout(groups_per_step=512, samples=16)
    assert fitting_scale(384, options) == 32
    assert fitting_scale(7, options) == 1
    limited = rollout(groups_per_step=512, samples=16, concurrency=96)
    assert fitting_scale(64, limited) == 4  # 6 episodes at once would be less than a group


def test_activations_are_recomputed_where_they_do_not_fit() -> None:
    kind, small, large = DEVICES["h800"], SHAPES["qwen2.5-1.5b"], SHAPES["qwen2.5-7b"]
    assert not recomputes(kind, small, longest=27_648, devices=2)
    assert recomputes(kind, small, longest=100_000, devices=2)
    assert recomputes(kind, large, longest=27_648, devices=48)
    assert not recomputes(kind, large, longest=27_648, devices=48, parallel=2)
    assert recomputes(kind, large, longest=1, devices=1), "the states alone do not fit"
