"""A step's metrics, under the names that the field uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from agentrl.train.batch import Batch
from agentrl.train.manifest import Manifest
from agentrl.train.prefix import share

if TYPE_CHECKING:  # a test of these sums need not load DeepSpeed
    from agentrl.train.deepspeed import StepResult

COUNTS = ("tokens/packed", "tokens/computed", "tokens/trained", "batch/sequences", "batch/episodes")


def local_counts(minibatches: Sequence[Sequence[Batch]]) -> torch.Tensor:
    """This rank's part of `COUNTS`, to be summed over ranks `[5]`."""
    counts = torch.zeros(len(COUNTS), dtype=torch.float64)
    for batch in (b for minibatch in minibatches for b in minibatch):
        if int(batch.episodes[0]) < 0:
            continue  # a dummy
        read = (batch.trained - 1).cpu().numpy()
        shared = share(batch.tokens.cpu().numpy(), batch.cu_seqlens.diff().tolist(), read)
        shares = torch.where(batch.mask, 1 / batch.episode_tokens.clamp(min=1), 0.0).double().sum()
        counts += torch.stack(
            [
                torch.tensor(float(len(batch.tokens))),
                torch.tensor(float(len(shared.computed))),
                batch.mask.sum().double(),
                torch.tensor(float(len(batch.cu_seqlens) - 1)),
                shares,
            ]
        )
    return counts


def rollout_metrics(taken: Manifest) -> dict[str, float]:
    """Rewards and lengths of the batch, from the manifest; lengths are the true ones, whatever is masked later."""
    episodes = [e for g in taken.groups for e in g.episodes]
    scored = [e for e in episodes if e.scored]
    rewards = [e.reward for e in scored if e.reward is not None]
    sampled = [float(sum(t.sampled for t in e.trajectories)) for e in scored]
    turns = [float(len({t.index for t in e.turns})) for e in scored]
    equal = [
        len({e.reward for e in g.episodes if e.scored}) < 2 for g in taken.groups if any(e.scored for e in g.episodes)
    ]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _deviation(rewards),
        "episodes/scored": float(len(scored)),
        "episodes/unscored": float(len(episodes) - len(scored)),
        "episodes/trajectories_mean": _mean([float(len(e.trajectories)) for e in scored]),
        "episodes/truncated_share": _mean([float(e.stop not in ("finished",)) for e in scored]),
        "length/mean": _mean(sampled),
        "length/max": max(sampled, default=0.0),
        "turns/mean": _mean(turns),
        "groups": float(len(taken.groups)),
        "groups/equal_rewards_share": _mean([float(x) for x in equal]),
    }


def version_metrics(minibatches: Sequence[Sequence[Batch]]) -> torch.Tensor:
    """Sequences whose trained tokens came from more than one version, and sequences, to be summed over ranks `[2]`."""
    several = total = 0
    for batch in (b for minibatch in minibatches for b in minibatch):
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            ages = batch.staleness[start:end][batch.mask[start:end]]
            total += len(ages) > 0
            several += len(ages) > 0 and bool((ages != ages[0]).any())
    return torch.tensor([several, total], dtype=torch.float64)


def train_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    """Means over the step's optimizer steps; the largest where a name ends in `/max`."""
    if not results:
        return {}
    names = results[0].metrics
    found = {
        name: max(r.metrics[name] for r in results)
        if name.endswith("/max")
        else _mean([r.metrics[name] for r in results])
        for name in names
    }
    for name in ("advantage", "return"):
        if f"{name}/square" in found:
            found[f"{name}/std"] = math.sqrt(max(found.pop(f"{name}/square") - found[f"{name}/mean"] ** 2, 0.0))
    if "value/error/square" in found:
        unexplained, variance = found.pop("value/error/square"), found["return/std"] ** 2
        found["value/explained_variance"] = 1 - unexplained / variance if variance > 0 else 0.0
    return {
        "loss": _mean([r.loss for r in results]),
        "grad_norm": _mean([r.grad_norm for r in results]),
        "applied": _mean([float(r.applied) for r in results]),
        **found,
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.hypot(*(v - mean for v in values)) / math.sqrt(max(len(values), 1))
