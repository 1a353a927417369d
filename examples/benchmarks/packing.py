"""Packed training against padded training: real tokens a second, at equal work.

    python examples/benchmarks/packing.py

One random model, one loss, one optimizer, one output head over real tokens only, and the same sequences of log-normal
lengths (σ = 1, mean 1k): what differs is how they are cut into micro-batches and how attention reads them.

    packed   the trainer's own plan: at most `--budget` tokens a micro-batch, attention by sequence
    sorted   sorted by length, as many rows as fit the budget when padded to their longest; transformers' SDPA and mask
    padded   in the order they came, as many rows as the budget holds at the mean length; the same attention

The sides take turns, each step is timed by the CPU time of this process (one thread), and the fastest counts: other
work on the machine does not. `fill` is the least of the plans of 512 sequences a rank, for 1, 2 and 8 ranks.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.train.__main__ import prepare_environment

prepare_environment()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402

from agentrl.conductor.feed import Batch as Fed  # noqa: E402
from agentrl.conductor.feed import manifest as describe  # noqa: E402
from agentrl.testing.tiny import make_tiny_model  # noqa: E402
from agentrl.train import algorithm, batch, experience, manifest, plan  # noqa: E402
from agentrl.train.attention import ATTENTION  # noqa: E402
from agentrl.train.deepspeed import Backend  # noqa: E402
from agentrl.train.model import Policy  # noqa: E402
from agentrl.train.options import AlgorithmOptions, Dtype, TrainOptions  # noqa: E402
from agentrl.types import (  # noqa: E402
    Context,
    Episode,
    Group,
    Sampled,
    Segment,
    Stop,
    Trajectory,
    Turn,
    Version,
)

MEAN, SIGMA = 1000.0, 1.0
VOCABULARY = 256
"""Below the tiny tokenizer's."""
Passes = list[plan.Pass]


def draw_lengths(rng: np.random.Generator, count: int) -> list[int]:
    """Log-normal, mean `MEAN`."""
    drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return [max(8, int(n)) for n in drawn]


def make_groups(lengths: Sequence[int], rng: np.random.Generator) -> list[Group]:
    """Groups of eight episodes of one turn: the first eighth of a sequence is its prompt."""
    episodes = []
    for index, length in enumerate(lengths):
        cut = max(1, length // 8)
        tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
        segments = (
            Segment(tokens[:cut], None, Context()),
            Segment(tokens[cut:], np.full(length - cut, -5.0, np.float32), Sampled(Version(1, 0))),
        )
        turns = (Turn(0, 0, length, float(index % 2)),)
        episodes.append(Episode(index // 8, index % 8, 0, 0, {}, (), turns, (Trajectory(segments),), Stop.FINISHED))
    return [Group(i // 8, 0, 0, "drawn", tuple(episodes[i : i + 8])) for i in range(0, len(episodes), 8)]


def taken(groups: Sequence[Group]) -> manifest.Manifest:
    """What the conductor would tell the trainer."""
    return manifest.parse(describe(Fed(1, groups, {}), 1, Version(1, 0)))


def packed_passes(of: manifest.Manifest, budget: int) -> Passes:
    """The trainer's own."""
    return list(plan.make_plan(of, ranks=1, minibatches=1, budget=budget, longest=None).passes[0][0])


def sorted_passes(items: Sequence[plan.Item], budget: int) -> Passes:
    """Longest first; rows padded to the longest of their pass fit the budget."""
    ordered = sorted(items, key=lambda item: -item.length)
    passes: list[list[plan.Item]] = [[]]
    for item in ordered:
        if passes[-1] and passes[-1][0].length * (len(passes[-1]) + 1) > budget:
            passes.append([])
        passes[-1].append(item)
    return [tuple(p) for p in passes]


def padded_passes(items: Sequence[plan.Item], budget: int) -> Passes:
    """In the order they came."""
    rows = max(1, int(budget / MEAN))
    return [tuple(items[i : i + rows]) for i in range(0, len(items), rows)]


def padded_hidden(policy: Policy) -> Callable[[Tensor, Tensor, list[int], Tensor], Tensor]:
    """`Policy.hidden` as others compute it: rows padded to the longest, and a mask."""
    backbone: Any = policy.model
    backbone = backbone.base_model

    def hidden(tokens: Tensor, positions: Tensor, lengths: list[int], read: Tensor) -> Tensor:
        rows = pad_sequence(list(torch.split(tokens, lengths)), batch_first=True)
        mask = pad_sequence([torch.ones(n, dtype=torch.int64, device=tokens.device) for n in lengths], batch_first=True)
        out = backbone(input_ids=rows, attention_mask=mask, use_cache=False)
        found: Tensor = out.last_hidden_state[mask.bool()][read]
        return found

    return hidden


class Sides:
    """One backend that trains the same sequences in three ways."""

    def __init__(self, folder: Path, groups: Sequence[Group], budget: int, dtype: Dtype = "fp32") -> None:
        self.backend = Backend(folder, TrainOptions(lr=1e-5, tokens_per_microbatch=budget, dtype=dtype))
        self.chosen = algorithm.load(AlgorithmOptions())
        self.groups = dict(enumerate(groups))
        told = taken(groups)
        self.credits = {place: self.chosen.credit(entry) for place, entry in enumerate(told.groups)}
        items = [
            plan.Item(g, e, 0, len(episode.trajectories[0]))
            for g, group in enumerate(groups)
            for e, episode in enumerate(group.episodes)
        ]
        self.tokens = sum(item.length for item in items)
        self.passes = {
            "packed": packed_passes(told, budget),
            "sorted": sorted_passes(items, budget),
            "padded": padded_passes(items, budget),
        }
        self.policy = self.backend._policy
        self.ways = {"packed": self.policy.hidden, "padded": padded_hidden(self.policy)}

    def computed(self, side: str) -> int:
        """Tokens computed, padding included."""
        passes = self.passes[side]
        if side == "packed":
            return sum(item.length for p in passes for item in p)
        return sum(max(item.length for item in p) * len(p) for p in passes)

    def step(self, side: str) -> tuple[float, float, float]:
        """CPU seconds, seconds and the loss of one optimizer step, packing included."""
        model: Any = self.policy.model
        model.set_attn_implementation(ATTENTION if side == "packed" else "sdpa")
        # Not a submodule: the way is exchanged on the instance.
        self.policy.__dict__["hidden"] = self.ways["packed" if side == "packed" else "padded"]
        cpu, begun = time.process_time(), time.perf_counter()
        packed = [batch.pack(p, self.groups, self.credits, version=0) for p in self.passes[side]]
        ready = experience.estimate(self.backend, self.chosen, [packed], len(self.groups))[0]
        result = self.backend.step(ready, self.chosen.loss, lr=0.0)
        return time.process_time() - cpu, time.perf_counter() - begun, result.grad_norm


def least_fill(budget: int) -> float:
    """Of 512 sequences a rank on 1, 2 and 8 ranks, over five draws."""
    fills = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        for ranks in (1, 2, 8):
            told = taken(make_groups(draw_lengths(rng, 512 * ranks), rng))
            fills.append(plan.make_plan(told, ranks=ranks, minibatches=1, budget=budget, longest=None).fill)
    return min(fills)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    lengths = [min(n, options.budget) for n in draw_lengths(rng, options.sequences)]
    with tempfile.TemporaryDirectory() as scratch:
        shape = {"layers": options.layers, "hidden": options.hidden, "intermediate": 4 * options.hidden}
        folder = make_tiny_model(Path(scratch) / "model", max_length=1 << 16, **shape)
        sides = Sides(folder, make_groups(lengths, rng), options.budget)
        spent: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides.passes}
        for _ in range(options.rounds):
            for side, found in spent.items():
                found.append(sides.step(side))
                print(f"{side:7} {found[-1][0]:6.1f} CPU s {found[-1][1]:6.1f} s, gradient norm {found[-1][2]:.6f}")
    best = {side: min(cpu for cpu, _, _ in found) for side, found in spent.items()}
    norms = [norm for found in spent.values() for _, _, norm in found]
    result = {
        "tokens": sides.tokens,
        **{f"{side}_tokens_per_cpu_second": round(sides.tokens / best[side]) for side in best},
        **{f"{side}_computed_share": round(sides.computed(side) / sides.tokens, 3) for side in best},
        "gradient_norms_differ_by": float(f"{(max(norms) - min(norms)) / max(norms):.2g}"),
        "fill": round(least_fill(options.budget), 4),
        "ratio_vs_sorted": round(best["sorted"] / best["packed"], 3),
        "ratio_vs_padded": round(best["padded"] / best["packed"], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
