"""Which split of the devices, and which η under a bound: the plans of a config, simulated and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agentrl.errors import ConfigError
from agentrl.rollout.options import RolloutOptions
from agentrl.simulate.calibrate import Calibration
from agentrl.simulate.cost import ConductorCost, EngineCost, Plan, TrainCost, Workload
from agentrl.simulate.options import SimulateConfig
from agentrl.simulate.presets import device, engine_cost, shape, train_cost
from agentrl.simulate.simulation import Report, simulate

ENOUGH_EPISODES = 256
"""A step, for a simulated part to be like the whole."""
AS_GOOD = 0.98
"""A smaller η that gives this share of the best tokens a second is better: data that is less stale is worth more."""
_STALENESS = (0, 1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated configuration: servers of `parallel` devices each, trainer ranks, η."""

    engines: int
    parallel: int
    ranks: int
    staleness: int
    scale: int
    report: Report

    @property
    def share(self) -> float:
        """Of the devices that generate."""
        return self.engines * self.parallel / (self.engines * self.parallel + self.ranks)


@dataclass(frozen=True, slots=True)
class Search:
    """Everything that was simulated."""

    work: Workload
    sources: tuple[str, ...]
    """Where the costs come from, a line each."""
    splits: tuple[Trial, ...]
    """All splits at the bound."""
    ages: tuple[Trial, ...]
    """All η with the best split."""

    @property
    def best(self) -> Trial:
        """The smallest η that is as good as the best."""
        most = max(trial.report.tokens_per_second for trial in self.ages)
        return min(
            (t for t in self.ages if t.report.tokens_per_second >= AS_GOOD * most), key=lambda trial: trial.staleness
        )


def search(
    config: SimulateConfig, found: Calibration | None = None, *, told: Callable[[Trial], None] = lambda _: None
) -> Search:
    """Simulate the splits at the bound, then each η with the best of them. `told` hears of each trial as it ends."""
    options = config.simulate
    work = found.work if found is not None else options.workload(config.rollout)
    bound = config.rollout.staleness
    ages = sorted(set(options.staleness or [age for age in (*_STALENESS, bound) if age <= bound]))

    def trial(engines: int, ranks: int, staleness: int) -> Trial:
        plan = Plan(
            engines,
            _engine(config, work, found),
            _trainer(config, found, ranks),
            work,
            found.conductor if found is not None else ConductorCost(),
            options.interrupt,
        )
        rollout = _with_staleness(config.rollout, staleness)
        scale = options.scale or fitting_scale(engines, rollout)
        report = simulate(plan, rollout, steps=options.steps, seed=config.seed, scale=scale)
        made = Trial(engines, config.engine.tensor_parallel, ranks, staleness, scale, report)
        told(made)
        return made

    splits = [trial(engines, ranks, ages[-1]) for engines, ranks in _splits(config)]
    best = max(splits, key=lambda t: t.report.tokens_per_second)
    rest = [trial(best.engines, best.ranks, age) for age in ages[:-1]]
    sources = found.sources if found is not None else _presets(config, work)
    return Search(work, sources, tuple(splits), (*rest, best))


def fitting_scale(engines: int, rollout: RolloutOptions) -> int:
    """The largest k that divides engines, groups and concurrency and leaves episodes enough."""
    groups, concurrency = rollout.groups_per_step, rollout.concurrency or 0
    return max(
        k
        for k in range(1, engines + 1)
        if not (engines % k or groups % k or concurrency % k)
        and (k == 1 or groups * rollout.samples // k >= ENOUGH_EPISODES)
        and (k == 1 or not concurrency or concurrency // k >= rollout.started)
    )


def _with_staleness(rollout: RolloutOptions, staleness: int) -> RolloutOptions:
    given = {**rollout.model_dump(exclude_unset=True), "staleness": staleness}
    if staleness == 0:
        given.pop("keep_abandoned", None)  # has no effect there
    return RolloutOptions.model_validate(given)


def _splits(config: SimulateConfig) -> Iterator[tuple[int, int]]:
    options, parallel = config.simulate, config.engine.tensor_parallel
    if options.gpus is None:
        yield config.engine.count, config.train.ranks
        return
    tried = set()
    for share in options.shares:
        engines = max(1, round(share * options.gpus / parallel))
        ranks = options.gpus - engines * parallel
        if ranks > 0 and engines not in tried:
            tried.add(engines)
            yield engines, ranks
    if not tried:
        raise ConfigError(f"simulate.gpus = {options.gpus} leaves no device for a trainer beside {parallel} an engine")


def _engine(config: SimulateConfig, work: Workload, found: Calibration | None) -> EngineCost:
    if found is not None:
        return replace(found.engine, slots=config.engine.max_running)
    options = config.simulate
    form = shape(options.model, config.model)
    return engine_cost(
        device(options.hardware),
        form,
        work,
        parallel=config.engine.tensor_parallel,
        slots=config.engine.max_running,
    )


def _trainer(config: SimulateConfig, found: Calibration | None, ranks: int) -> TrainCost:
    if found is not None:
        return found.trainer(ranks)
    options = config.simulate
    form = shape(options.model, config.model)
    return train_cost(
        device(options.hardware),
        form,
        devices=ranks,
        minibatches=config.train.minibatches,
        recompute=config.train.checkpointing,
    )


def _presets(config: SimulateConfig, work: Workload) -> tuple[str, ...]:
    options = config.simulate
    form = shape(options.model, config.model)
    cost = _engine(config, work, None)
    return (
        f"costs of {options.hardware} from its data sheet, {form.parameters / 1e9:.2f} billion parameters, "
        f"{form.kv_bytes / 1024:.0f} KiB of cache a token",
        f"an engine of {config.engine.tensor_parallel} runs up to {cost.slots} sequences and decodes them at "
        f"{cost.slots / cost.decode(cost.slots, cost.slots * work.held):.0f} tokens/s",
    )
