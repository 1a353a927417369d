"""Prove from a run's own records that every published version arrived in the engine.

    python examples/prove_publishes.py runs/calculator        # a run with train.checkpoint_every = 1

The pool holds every token that was sampled, with the log-prob the engine reported and the version it was labelled with;
the checkpoints hold the trainer's weights of those versions. For each version, a fresh forward pass of its checkpoint
must give the engine's log-probs. Prints one JSON line a version and one for the run; exit code 1 where one differs.

Versions without a checkpoint that was kept (train.keep_checkpoints) cannot be judged and are listed as such.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers

from agentrl.train.checkpoint import read
from agentrl.types import Float32Array, Int32Array, Sampled, Trajectory, Version
from agentrl.wire import decode_group

TOLERANCE = 1e-4
SEQUENCES = 40
"""Judged a version."""


class Stretch(NamedTuple):
    """Tokens `start` to the end of `tokens` were sampled by one version, with these log-probs."""

    tokens: Int32Array
    start: int
    logprobs: Float32Array
    temperature: float


def stretches(run: Path) -> dict[Version, list[Stretch]]:
    """Everything sampled that the pool still holds, by the version it is labelled with."""
    found: dict[Version, list[Stretch]] = defaultdict(list)
    for trajectory in _trajectories(run / "pool.sqlite"):
        at = 0
        for segment in trajectory.segments:
            source, begin = segment.source, at
            at += len(segment)
            if isinstance(source, Sampled) and segment.logprobs is not None and begin > 0:
                found[source.version].append(
                    Stretch(trajectory.tokens[:at], begin, segment.logprobs, source.temperature)
                )
    return found


def _trajectories(pool: Path) -> Iterator[Trajectory]:
    with closing(sqlite3.connect(f"file:{pool}?mode=ro", uri=True)) as database:
        for (body,) in database.execute("SELECT body FROM groups ORDER BY position"):
            for episode in decode_group(body).episodes:
                yield from episode.trajectories


@torch.no_grad()
def worst(model: torch.nn.Module, stretch: Stretch) -> float:
    """The largest difference between the engine's log-probs and a fresh forward pass."""
    logits = model(torch.tensor(stretch.tokens[None].astype(np.int64))).logits[0, stretch.start - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (stretch.temperature or 1.0), -1)
    chosen = torch.tensor(stretch.tokens[stretch.start :].astype(np.int64))
    mine = logprobs.gather(-1, chosen[:, None])[:, 0].numpy()
    return float(np.abs(mine - stretch.logprobs).max())


def models(run: Path, first: Path | None) -> dict[Version, Path]:
    """The trainer's weights by version; `first` are those that the run started from."""
    found = {Version(1, 0): first} if first is not None else {}
    for folder in sorted((run / "checkpoints").glob("step-*")):
        checkpoint = read(folder)
        found[Version.parse(checkpoint.version)] = checkpoint.model
    return found


def main() -> int:
    """Judge every version; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--first", type=Path, help="the model that the run started from, to judge version 1.0 too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sampled, weights = stretches(options.run), models(options.run, options.first)
    unknown = sorted(set(sampled) - set(weights))
    proved: list[str] = []
    wrong: list[str] = []
    for version in sorted(set(sampled) & set(weights)):
        model = transformers.AutoModelForCausalLM.from_pretrained(weights[version], dtype=torch.float32).eval()
        chosen = sampled[version][:: max(1, len(sampled[version]) // SEQUENCES)][:SEQUENCES]
        difference = max(worst(model, stretch) for stretch in chosen)
        (proved if difference <= TOLERANCE else wrong).append(str(version))
        tokens = sum(len(stretch.logprobs) for stretch in chosen)
        print(
            json.dumps(
                {"version": str(version), "tokens": tokens, "max_logprob_difference": float(f"{difference:.2g}")}
            )
        )
    several = sum(
        len({s.source.version for s in t.segments if isinstance(s.source, Sampled)}) > 1
        for t in _trajectories(options.run / "pool.sqlite")
    )
    print(
        json.dumps(
            {
                "proved": proved,
                "wrong": wrong,
                "no_checkpoint": [str(v) for v in unknown],
                "trajectories_of_several_versions": several,
            }
        )
    )
    return 1 if wrong or not proved else 0


if __name__ == "__main__":
    sys.exit(main())
