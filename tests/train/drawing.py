"""Trajectories drawn by hand, groups at random, and the recorded cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.train import manifest
from agentrl.types import (
    Context,
    Demonstration,
    Episode,
    Group,
    Sampled,
    Segment,
    Stop,
    Trajectory,
    Turn,
    Version,
)

CASES = Path(__file__).parent.parent / "cases"


def read_cases(name: str) -> dict[str, dict[str, Any]]:
    lines = (CASES / f"{name}.jsonl").read_text().splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}


def draw(picture: str, *, first: int = 10, version: int = 0, temperature: float = 1.0) -> Trajectory:
    """A trajectory from a picture: `c` a context token, `s` a sampled one, `u` sampled and untrained, `d` demonstrated.

    A digit is the version of the tokens sampled after it. Tokens count up from `first`, log-probs down from -0.1.
    """
    segments: list[Segment] = []
    kinds: list[tuple[str, int]] = []
    for letter in picture:
        if letter.isdigit():
            version = int(letter)
        else:
            kinds.append((letter, version))
    at = 0
    while at < len(kinds):
        end = at
        while end < len(kinds) and kinds[end] == kinds[at]:
            end += 1
        tokens = np.arange(first + at, first + end, dtype=np.int32)
        logprobs = (-0.1 * np.arange(at + 1, end + 1)).astype(np.float32)
        letter, number = kinds[at]
        if letter == "c":
            segments.append(Segment(tokens, None, Context()))
        elif letter == "d":
            segments.append(Segment(tokens, None, Demonstration()))
        else:
            segments.append(Segment(tokens, logprobs, Sampled(Version(1, number), temperature, letter == "s")))
        at = end
    return Trajectory(tuple(segments))


def episode(
    trajectories: Sequence[Trajectory],
    turns: Sequence[tuple[int, int | None, int, float | None]],
    *,
    group: int = 0,
    sample: int = 0,
    stop: Stop = Stop.FINISHED,
) -> Episode:
    marks = tuple(Turn(index, trajectory, end, reward) for index, trajectory, end, reward in turns)
    return Episode(group, sample, 0, 0, {}, (), marks, tuple(trajectories), stop)


def random_group(
    id: int,
    rng: np.random.Generator,
    *,
    samples: int = 4,
    version: int = 0,
    vocabulary: int = 200,
    long: int = 20,
    split: bool = False,
) -> Group:
    """Three turns an episode, in one trajectory or (`split`) one each; rewards 0 or 1 on the last."""
    episodes = []
    for sample in range(samples):
        segments: list[Segment] = []
        trajectories: list[Trajectory] = []
        turns = []
        at = 0
        for index in range(3):
            c, n = int(rng.integers(2, long)), int(rng.integers(1, long))
            segments.append(Segment(rng.integers(0, vocabulary, c).astype(np.int32), None, Context()))
            logprobs = -rng.uniform(4, 7, n).astype(np.float32)
            segments.append(
                Segment(rng.integers(0, vocabulary, n).astype(np.int32), logprobs, Sampled(Version(1, version)))
            )
            at += c + n
            turns.append((index, len(trajectories), at, float(rng.integers(0, 2)) if index == 2 else 0.0))
            if split or index == 2:
                trajectories.append(Trajectory(tuple(segments)))
                segments, at = [], 0
        episodes.append(episode(trajectories, turns, group=id, sample=sample))
    return Group(id, 0, 0, "test", tuple(episodes))


def describe(groups: list[Group], version: int) -> manifest.Manifest:
    """What the conductor would send."""
    entries = [
        {
            "id": g.id,
            "env": g.env,
            "episodes": [
                {
                    "sample": e.sample,
                    "scored": e.scored,
                    "reward": e.reward,
                    "stop": e.stop.value,
                    "turns": [[t.index, t.trajectory, t.end, t.reward, t.agent] for t in e.turns],
                    "trajectories": [
                        {"length": len(t), "sampled": int(t.loss_mask.sum()), "abandoned": t.abandoned}
                        for t in e.trajectories
                    ],
                }
                for e in g.episodes
            ],
        }
        for g in groups
    ]
    return manifest.parse(
        {"take": 1, "step": version + 1, "version": str(Version(1, version)), "cursor": {}, "groups": entries}
    )
