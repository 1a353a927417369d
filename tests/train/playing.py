"""A small task of several turns, played by the policy itself: a token is shown at each, and its partner is right."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.train import experience
from agentrl.train.algorithm import Algorithm
from agentrl.train.batch import pack
from agentrl.train.model import Policy, load_policy
from agentrl.train.plan import make_plan
from agentrl.types import Context, Episode, Group, Sampled, Segment, Stop, Trajectory, Turn, Version
from tests.train.drawing import describe
from tests.train.plain import PlainBackend

SHOWN, VOCABULARY, TURNS = 4, 12, 3
GROUPS, SAMPLES = 6, 8


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def play(policies: list[Policy], versions: list[int], step: int, rng: torch.Generator) -> list[Group]:
    """Groups in which turn k was sampled by the k-th policy. Context at place 2k, the answer after it."""
    shown = torch.randint(0, SHOWN, (GROUPS, TURNS), generator=rng).repeat_interleave(SAMPLES, 0)
    tokens = torch.zeros(len(shown), 0, dtype=torch.int64)
    said = []
    with torch.no_grad():
        for turn, policy in enumerate(policies):
            tokens = torch.cat([tokens, shown[:, turn : turn + 1]], 1)
            logprobs = policy.model(input_ids=tokens, use_cache=False).logits[:, -1].float().log_softmax(1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=rng)
            said.append(logprobs.gather(1, chosen).squeeze(1))
            tokens = torch.cat([tokens, chosen], 1)
    right = tokens[:, 1::2] == shown + SHOWN
    rows = zip(tokens.numpy().astype(np.int32), torch.stack(said, 1).numpy(), right.tolist(), strict=True)
    episodes = [
        _episode(step * GROUPS + i // SAMPLES, i % SAMPLES, ids, logps, hits, versions)
        for i, (ids, logps, hits) in enumerate(rows)
    ]
    return [
        Group(step * GROUPS + g, 0, 0, "partners", tuple(episodes[g * SAMPLES : (g + 1) * SAMPLES]))
        for g in range(GROUPS)
    ]


def _episode(
    group: int,
    sample: int,
    ids: np.ndarray[tuple[int], np.dtype[np.int32]],
    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]],
    hits: list[bool],
    versions: list[int],
) -> Episode:
    segments: list[Segment] = []
    turns = []
    for k, hit in enumerate(hits):
        segments.append(Segment(ids[2 * k : 2 * k + 1], None, Context()))
        segments.append(Segment(ids[2 * k + 1 : 2 * k + 2], logprobs[k : k + 1], Sampled(Version(1, versions[k]), 1.0)))
        turns.append(Turn(k, 0, 2 * k + 2, hit / TURNS))
    return Episode(group, sample, 0, 0, {}, (), tuple(turns), (Trajectory(tuple(segments)),), Stop.FINISHED)


def learn(
    folder: Path,
    algorithm: Algorithm,
    *,
    steps: int,
    lr: float,
    minibatches: int = 1,
    lag: int = 0,
    enough: float = 0.9,
) -> tuple[list[float], list[dict[str, float]]]:
    """Mean rewards of each step until they are enough, and the metrics. `lag`: versions between an episode's first
    tokens and the weights that train on them; later turns are sampled by later versions."""
    torch.set_num_threads(1)  # tensors this small are only held up by a second thread
    backend = PlainBackend(folder, algorithm)
    rng = torch.Generator().manual_seed(1)
    actors = [load_policy(folder, torch.float32) for _ in range(TURNS)]
    history: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)
    rewards: list[float] = []
    metrics: list[dict[str, float]] = []
    for step in range(steps):
        history.append({k: v.clone() for k, v in backend.policy.model.state_dict().items()})
        ages = [min(k, len(history) - 1) for k in range(TURNS)]
        for actor, age in zip(actors, ages, strict=True):
            actor.model.load_state_dict(history[age])
        versions = [step - (len(history) - 1) + age for age in ages]
        groups = play(actors, versions, step, rng)
        rewards.append(float(np.mean([e.reward for g in groups for e in g.episodes])))
        if np.mean(rewards[-3:]) >= enough:
            break
        taken = describe(groups, step)
        plan = make_plan(taken, ranks=1, minibatches=minibatches, budget=1 << 16, longest=None)
        credits = {i: algorithm.credit(entry) for i, entry in enumerate(taken.groups)}
        batches = [
            [pack(items, dict(enumerate(groups)), credits, version=step) for items in minibatch[0]]
            for minibatch in plan.passes
        ]
        ready = experience.estimate(backend, algorithm, experience.predict(backend, algorithm, batches), len(groups))
        metrics += [
            backend.step(part, algorithm.loss, lr=lr, entropy_gradient=algorithm.entropy_gradient) for part in ready
        ]
    return rewards, metrics
