"""The plan of a run in words: its processes, memory by ZeRO stage, tokens a step, expected staleness, disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator

from agentrl.conductor import estimate
from agentrl.conductor.config import RunConfig
from agentrl.conductor.folder import SHARED_MEMORY
from agentrl.conductor.machine import gpu_count, memory, size, space
from agentrl.conductor.rehearsal import Tried
from agentrl.engine.weights import model_limits
from agentrl.errors import ConfigError


def forecast(config: RunConfig, rows: Tried | None) -> Iterator[str]:
    """Line by line. ConfigError where the disk is too small for the checkpoints."""
    model = estimate.model_size(config.model)
    yield from _processes(config)
    yield from _trainer(config, model)
    yield from _engines(config, model)
    yield from _tokens(config, rows)
    yield from _staleness(config)
    yield from _disk(config, model)


def _processes(config: RunConfig) -> Iterator[str]:
    engine, train = config.engine, config.train
    yield "processes"
    evaluation = f", evaluation every {config.eval.every} steps" if config.eval.every else ""
    yield f"  1 conductor    config, rollouts, endpoint, pool, publishing{evaluation}"
    gpus = f", GPUs {list(engine.gpus)}" if engine.gpus else ""
    parallel = f", {engine.tensor_parallel} GPUs each" if engine.tensor_parallel > 1 else ""
    serves = f"{engine.kind}, {engine.dtype}, {engine.max_running} sequences at once"
    yield f"  {engine.count} × engine     {serves}{parallel}{gpus}"
    if config.eval.every and config.eval.engine == "own":
        yield "  1 × engine     set aside for evaluations" + (
            f", GPUs {list(config.eval.gpus)}" if config.eval.gpus else ""
        )
    started = f"torchrun, {train.ranks} ranks" if train.ranks > 1 else "1 rank"
    placed = f", GPUs {list(train.gpus)}" if train.gpus else ""
    yield f"  trainer        {started}, DeepSpeed ZeRO-3, {train.dtype}{placed}"


def _trainer(config: RunConfig, model: estimate.ModelSize) -> Iterator[str]:
    train = config.train
    reference = config.algorithm.kl_coef > 0
    kinds = "weights, gradients, optimizer" + (", frozen reference" if reference else "")
    yield f"memory of each trainer rank ({kinds}), {train.ranks} rank{'s' * (train.ranks != 1)}"
    stages = [estimate.trainer_bytes(model, s, train.ranks, train.dtype, reference=reference) for s in range(4)]
    yield "  " + "   ".join(f"ZeRO-{stage} {size(n)}" for stage, n in enumerate(stages)) + "   (ZeRO-3 is used)"
    kept = estimate.activation_bytes(model, train.tokens_per_microbatch, train.dtype, checkpointing=train.checkpointing)
    how = "recomputed (train.checkpointing)" if train.checkpointing else "kept; train.checkpointing = true keeps fewer"
    yield f"  and about {size(kept)} of activations for {train.tokens_per_microbatch} packed tokens, {how}"
    available, total = memory()
    if not config.train.gpus and (stages[3] + kept) * train.ranks > available and not gpu_count():
        yield (
            f"  WARNING: {size((stages[3] + kept) * train.ranks)} for all ranks on this CPU, {size(available)} of "
            f"{size(total)} available: lower train.tokens_per_microbatch, or take a smaller model"
        )


def _engines(config: RunConfig, model: estimate.ModelSize) -> Iterator[str]:
    engine = config.engine
    longest = model_limits(config.model, engine.context_length).context_length
    weights, cache = estimate.engine_bytes(model, engine.dtype, engine.max_running * longest, engine.tensor_parallel)
    yield "memory of each engine"
    line = f"  weights {size(weights)}; keys and values of {engine.max_running} whole contexts of {longest} tokens "
    pool = " (an engine caches what fits, the rest waits)" if engine.kind == "sglang" else ""
    yield f"{line}{size(cache)}{pool}"


def _tokens(config: RunConfig, rows: Tried | None) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    episodes = rollout.groups_per_step * rollout.samples
    prompt = rows.mean if rows else 0.0
    most = episodes * (prompt + rollout.max_tokens)
    yield "a step"
    yield (
        f"  {rollout.groups_per_step} groups × {rollout.samples} episodes = {episodes} episodes, each at most "
        f"{rollout.max_turns} turns and {rollout.max_tokens} sampled tokens"
    )
    passes = math.ceil(most / train.tokens_per_microbatch / train.ranks)
    yield (
        f"  at most {most:,.0f} tokens (first messages {prompt:.0f} on average; what the environment says later comes "
        f"on top): up to {passes} micro-batch{'es' * (passes != 1)} on each rank"
    )
    if rollout.extra_samples:
        yield f"  {rollout.extra_samples} further episodes a group are started; the slowest are cancelled"


def _staleness(config: RunConfig) -> Iterator[str]:
    pace = estimate.pace(config)
    rollout, engine = config.rollout, config.engine
    limit = "rollout.concurrency" if pace.capped else "the staleness bound"
    yield "asynchrony"
    yield (
        f"  at most {pace.groups_live} groups live, {pace.groups_running} of them run at once ({pace.episodes_running} "
        f"episodes, limited by {limit})"
    )
    if rollout.concurrency is not None and not pace.capped:
        yield f"  rollout.concurrency = {rollout.concurrency} is never reached"
    room = engine.count * engine.max_running
    if pace.episodes_running > room:
        yield f"  {pace.episodes_running - room} of them wait for a place in the engines ({room} places)"
    if rollout.staleness == 0:
        yield "  staleness 0: every token is of the newest weights; rollouts and trainer take turns"
        return
    yield (
        f"  expected staleness: about {pace.least:.1f} versions where rollouts are the slower side, up to {pace.most} "
        f"(the bound) where the trainer is"
    )


def _disk(config: RunConfig, model: estimate.ModelSize) -> Iterator[str]:
    train = config.train
    one = estimate.checkpoint_bytes(model, train.dtype)
    kept = (train.keep_checkpoints if train.checkpoint_every else 1) + 1
    version = estimate.weights_bytes(model, train.dtype)
    found = space(config.run_dir / config.name)
    yield "disk"
    yield f"  {kept} checkpoints of {size(one)} while one is written, {size(found.free)} free"
    shared = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 3 * version + (64 << 20)
    way = "shared memory" if shared else "the run folder"
    yield f"  new weights, {size(version)} each, go to the engines through {way}"
    if kept * one > found.free:
        raise ConfigError(
            f"{kept} checkpoints of {size(one)} do not fit on the disk, {size(found.free)} are free: set run_dir to "
            "another disk, or lower train.keep_checkpoints"
        )
