"""A made-up run: what the page's tests, its benchmark and the screenshots look at. Nothing in it was ever trained."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from agentrl.monitor.archive import Archive
from agentrl.testing.tiny import tiny_tokenizer
from agentrl.train.trace import Place, TokenTrace, encode_traces
from agentrl.types import (
    Context,
    Episode,
    Group,
    Message,
    Sampled,
    Segment,
    SplitReason,
    Stop,
    Trajectory,
    Turn,
    Version,
)

CONFIG = """name = "{name}"
model = "model"

[env]
path = "made.up:Sums"

[train]
steps = {steps}
"""
FILTERED_EVERY = 6
LOST_EVERY = 23
SPLIT_EVERY = 7


@dataclass(frozen=True)
class Shape:
    """How large the run is. `texts` stand in turn where a model, a tool and a row speak."""

    steps: int = 12
    groups: int = 4
    samples: int = 4
    seed: int = 0
    env: str = "Sums"
    texts: Sequence[str] = ()
    started: float = 1_760_000_000.0


def make_sample_run(folder: Path, shape: Shape) -> None:
    """Write a finished run into `folder`; the same bytes of metrics for the same shape."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(name=folder.name, steps=shape.steps), encoding="utf-8")
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "state.json").write_text(
        json.dumps({"phase": "finished", "time": shape.started + 4 * shape.steps, "error": None}), encoding="utf-8"
    )
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for line in metric_lines(shape):
            file.write(json.dumps(line) + "\n")
    archive = Archive(folder / "episodes.sqlite", limit=1 << 40)
    for step in range(1, shape.steps + 1):
        while archive.waiting > 200:
            time.sleep(0.05)
        _record_step(archive, _Maker(shape, tokenizer), step)
    archive.close(timeout=600.0)
    if archive.left_out:
        raise RuntimeError(f"{archive.left_out} groups of the sample run were left out")


def metric_lines(shape: Shape) -> Iterator[dict[str, Any]]:
    """What metrics.jsonl of the run holds."""
    draw = np.random.default_rng(shape.seed)
    yield {"kind": "begin", "time": shape.started, "step": 0, "version": "1.0", "take": 0}
    for step in range(1, shape.steps + 1):
        when = shape.started + 4.0 * step
        yield {"kind": "step", "time": when, "step": step, "version": f"1.{step}", **_figures(shape, step, draw)}
        yield {
            "kind": "publish",
            "time": when + 0.2,
            "step": step,
            "version": f"1.{step}",
            "publish/stall_ms": 90.0 + 40.0 * draw.random(),
        }
        if step % 5 == 0:
            yield {
                "kind": "eval",
                "time": when + 2.0,
                "step": step,
                "eval/reward": _reward_mean(shape, step) + 0.02 * draw.standard_normal(),
                "eval/reward_error": 0.03,
                "eval/seconds": 1.6,
            }
        if step % 10 == 0:
            yield {"kind": "checkpoint", "time": when + 0.5, "step": step, "path": f"checkpoints/step-{step:07}"}
        if step == shape.steps // 2:
            error = "the trainer was killed by SIGKILL\nthe end of its log"
            yield {"kind": "fault", "time": when + 1.0, "what": "trainer", "code": 137, "error": error}


def _reward_mean(shape: Shape, step: int) -> float:
    return 0.25 + 0.65 * (1 - math.exp(-3.0 * step / max(shape.steps, 1)))


def _figures(shape: Shape, step: int, draw: np.random.Generator) -> dict[str, Any]:
    share = step / shape.steps
    mean = _reward_mean(shape, step) + 0.03 * draw.standard_normal()
    fresh, one = 0.6 - 0.2 * share, 0.25
    seconds = {"take": 0.3, "fetch": 0.1, "pack": 0.1, "train": 2.4, "weights": 0.2}
    return {
        "reward/mean": mean,
        "envs": {
            shape.env: {
                "episodes": shape.groups * shape.samples,
                "groups": shape.groups,
                "reward": mean,
                "reward_error": 0.04,
                "length": 40 + 30 * share + draw.standard_normal(),
                "length_error": 1.5,
                "turns": 2.0,
                "turns_error": 0.1,
            }
        },
        "loss": 0.1 * draw.standard_normal(),
        "grad_norm": 1.0 + 0.3 * draw.random(),
        "entropy": 2.0 - 1.2 * share,
        "kl/behaviour": 0.004 + 0.002 * draw.random(),
        "kl/proximal": 0.001 * draw.random(),
        "ratio/mean": 1.0,
        "ratio/max": 1.6 + draw.random(),
        "behaviour/ratio_mean": 1.0 + 0.01 * draw.standard_normal(),
        "ratio/clip_fraction": 0.05 * draw.random(),
        "staleness/mean": 1.0 + draw.random(),
        "staleness/max": float(draw.integers(2, 5)),
        "staleness/flight_0": fresh,
        "staleness/flight_1": one,
        "staleness/flight_2-3": 0.75 - fresh,
        "staleness/queue_0": 0.2,
        "staleness/queue_1": 0.6,
        "staleness/queue_2-3": 0.2,
        "rollout/tokens_per_second": 1300 + 100 * draw.standard_normal(),
        "tokens_per_second": 5000 + 300 * draw.standard_normal(),
        "engine/idle_share": 0.05 + 0.1 * draw.random(),
        "trainer/idle_share": 0.1 + 0.1 * draw.random(),
        "pool/pooled": float(draw.integers(0, 3 * shape.groups)),
        "rollout_running": float(shape.groups),
        "rollout_taken_now": float(shape.groups),
        "rollout/stop_finished": float(shape.groups * shape.samples - 2),
        "rollout/stop_max_tokens": 2.0,
        "rollout/groups_pooled": float(shape.groups - 1),
        "rollout/groups_filtered": 1.0,
        "publish/stall_ms": 100.0 + 20.0 * draw.random(),
        "publish/load_ms": 60.0,
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "seconds/step": sum(seconds.values()),
    }


def _record_step(archive: Archive, maker: _Maker, step: int) -> None:
    shape = maker.shape
    groups = [maker.group((step - 1) * shape.groups + i, step) for i in range(shape.groups)]
    trained = []
    for group in groups:
        fate = "filtered" if group.id % FILTERED_EVERY == FILTERED_EVERY - 1 else "pooled"
        archive.group(group, fate, step=step)
        if fate == "pooled":
            trained.append(group)
    archive.taken(step, [group.id for group in trained])
    archive.trace(step, 0, encode_traces([t for group in trained for t in maker.traces(group)]))
    if step % 5 == 0:
        archive.group(maker.group(step % shape.groups, step), "evaluated", step=step, kind="eval")


class _Maker:
    def __init__(self, shape: Shape, tokenizer: Tokenizer) -> None:
        self.shape, self._tokenizer = shape, tokenizer

    def group(self, position: int, step: int) -> Group:
        draw = np.random.default_rng((self.shape.seed, position))
        episodes = tuple(self._episode(position, sample, step, draw) for sample in range(self.shape.samples))
        return Group(position, 0, 0, self.shape.env, episodes)

    def traces(self, group: Group) -> Iterator[TokenTrace]:
        draw = np.random.default_rng((self.shape.seed, group.id, 1))
        for index, episode in enumerate(group.episodes):
            for place, trajectory in enumerate(episode.trajectories):
                mask = trajectory.loss_mask
                advantage = np.where(mask, np.float32((episode.reward or 0.0) - 0.5), np.nan).astype(np.float32)
                moved = trajectory.logprobs + 0.1 * draw.standard_normal(len(trajectory))
                logprobs = np.where(mask, moved, np.nan).astype(np.float32)
                yield TokenTrace(Place(group.id, index, place), advantage, logprobs)

    def _text(self, place: int, plain: str) -> str:
        texts = self.shape.texts
        return texts[place % len(texts)] if texts else plain

    def _episode(self, position: int, sample: int, step: int, draw: np.random.Generator) -> Episode:
        a, b = int(draw.integers(10, 99)), int(draw.integers(10, 99))
        lost = (position * self.shape.samples + sample) % LOST_EVERY == LOST_EVERY - 1
        right = bool(draw.random() < _reward_mean(self.shape, step))
        question = self._text(position, f"What is {a} + {b}?")
        said = self._text(position + sample + 1, f"I will ask the calculator for {a} + {b}.")
        told = self._text(position + sample + 2, str(a + b))
        answer = self._text(position + sample + 3, str(a + b + (0 if right else 10)))
        call = {
            "id": "call0",
            "type": "function",
            "function": {"name": "calc", "arguments": f'{{"expression": "{a}+{b}"}}'},
        }
        messages: tuple[Message, ...] = (
            {"role": "user", "content": question},
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call0", "content": told},
            {"role": "assistant", "content": answer},
        )
        versions = (max(0, step - 2), max(0, step - 1))
        first = Trajectory((self._context(question), self._sampled(said, versions[0], draw)))
        second = (self._context(told), self._sampled(answer, versions[1], draw))
        split = (position + sample) % SPLIT_EVERY == 0
        trajectories: tuple[Trajectory, ...]
        if split:
            trajectories = (first, Trajectory(second, SplitReason.EDITED))
            turns = (Turn(0, 0, len(first), 0.0), Turn(1, 1, len(trajectories[1]), float(right)))
        else:
            trajectories = (Trajectory((*first.segments, *second)),)
            turns = (
                Turn(0, 0, len(first), 0.0),
                Turn(1, 0, len(trajectories[0]), float(right), parts={"right": float(right)}),
            )
        return Episode(
            group=position,
            sample=sample,
            attempt=0,
            seed=position,
            row={"id": self._text(position, f"row {position}"), "question": f"{a} + {b}"},
            messages=messages,
            turns=turns,
            trajectories=trajectories,
            stop=Stop.SANDBOX_LOST if lost else Stop.FINISHED,
            metrics={"seconds": round(float(draw.random()), 3)},
            error=self._text(position, "the sandbox went away") if lost else None,
        )

    def _context(self, text: str) -> Segment:
        return Segment(np.array(self._tokenizer.encode(text or " ").ids, np.int32), None, Context())

    def _sampled(self, text: str, version: int, draw: np.random.Generator) -> Segment:
        ids = np.array(self._tokenizer.encode(text or " ").ids, np.int32)
        logprobs = -np.abs(draw.standard_normal(len(ids))).astype(np.float32)
        return Segment(ids, logprobs, Sampled(Version(1, version)))
