"""Settings that were given and change nothing in the mode that the others choose: errors at start, not silences.

What one section can see by itself its own options refuse; here is what follows from several sections, or from the
machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from agentrl.conductor.config import RunConfig, SftConfig
from agentrl.errors import ConfigError
from agentrl.train.options import TrainOptions


def refuse_dead_knobs(config: RunConfig | SftConfig, *, gpus: int | None = None) -> None:
    """ConfigError that names every setting without effect.

    `gpus` is how many the machine has that the run is for; None: it is another one than this.
    """
    found = [*_dead_in_training(config.train, gpus)]
    if isinstance(config, RunConfig):
        found += [*_dead_anywhere(config), *(_dead_here(config, gpus) if gpus is not None else ())]
    elif _given(config.monitor, "engine_restarts"):
        found.append("monitor.engine_restarts has no effect: no engine takes part in imitation; remove it")
    if found:
        raise ConfigError("\n".join(found))


def _dead_in_training(train: TrainOptions, gpus: int | None) -> Iterator[str]:
    if train.ranks == 1 and _given(train, "collective_timeout"):
        yield "train.collective_timeout has no effect with train.ranks = 1: there is no other rank; remove it"
    if train.checkpoint_every == 0 and _given(train, "keep_checkpoints"):
        yield "train.keep_checkpoints has no effect with train.checkpoint_every = 0: only the last is kept; remove it"
    if train.offload_optimizer and gpus == 0:
        yield "train.offload_optimizer has no effect with no GPU on this machine: all is in its memory; remove it"
    if gpus and _given(train, "threads"):
        yield "train.threads has no effect on a GPU: remove it"
    if _given(train, "gpus") and gpus == 0:
        yield "train.gpus has no effect with no GPU on this machine: remove it, or run where there is a GPU"


def _dead_anywhere(config: RunConfig) -> Iterator[str]:
    data, rollout = config.data, config.rollout
    if config.eval.every == 0:
        sections = [data, *(part.data for part in config.env.parts)]
        for key in ("eval", "eval_split"):
            if any(_given(section, key) for section in sections):
                yield f"data.{key} has no effect with eval.every = 0: nothing is evaluated; remove one of them"
    if not rollout.filter_equal and _given(rollout, "max_filtered"):
        yield "rollout.max_filtered has no effect: no group is filtered, since rollout.filter_equal is false; remove it"
    if rollout.staleness == 0 and _given(rollout, "when_stale"):
        yield "rollout.when_stale has no effect with rollout.staleness = 0: nothing grows stale; remove one of them"
    yield from _dead_beside_the_cluster(config)
    if len(config.env.parts) == 1 and _given(config.env.parts[0], "weight"):
        yield "env.weight has no effect with one [[env]]: its share is all there is; remove it"


def _dead_beside_the_cluster(config: RunConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.rollout_workers:
        for key in ("host", "port"):
            if _given(config.endpoint, key):
                yield (
                    f"endpoint.{key} has no effect with cluster.rollout_workers = {cluster.rollout_workers}: each "
                    "rollout process has an endpoint of its own, on loopback; remove one of them"
                )
    elif _given(cluster, "ray_rollout"):
        yield "cluster.ray_rollout has no effect with cluster.rollout_workers = 0: there is none; remove it"


def _dead_here(config: RunConfig, gpus: int) -> Iterator[str]:
    engine, train = config.engine, config.train
    if engine.kind == "sglang" and (engine.device == "cpu" or gpus == 0):
        why = "engine.device = 'cpu'" if engine.device == "cpu" else "no GPU on this machine"
        for key in ("gpus", "memory_fraction"):
            if _given(engine, key):
                yield f"engine.{key} has no effect with {why}: remove it, or run where there is a GPU"
    if engine.device == "cuda" and gpus == 0:
        yield "engine.device = 'cuda', and this machine has no GPU: use 'auto' or 'cpu'"
    for key, wanted in (("engine.gpus", engine.gpus), ("train.gpus", train.gpus)):
        beyond = [number for number in wanted or () if number >= gpus]
        if gpus and beyond:
            yield f"{key} names GPU {beyond[0]}, and this machine has {gpus}: they count from 0"


def _given(section: BaseModel, key: str) -> bool:
    return key in section.model_fields_set
