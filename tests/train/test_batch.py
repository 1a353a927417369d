"""Translator 2: drawings of trajectories and the tensors they become."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl.errors import RunError
from agentrl.train import manifest, report
from agentrl.train.batch import Batch, pack
from agentrl.train.functional import Denominators, token_weights
from agentrl.train.plan import Item, make_plan
from agentrl.types import Group, Stop
from tests.train.drawing import describe, draw, episode

Case = dict[str, dict[str, Any]]


def packed(group: Group, *places: tuple[int, int], version: int = 3, **more: Any) -> Batch:
    credit = [{t.index: 10.0 * e.sample + t.index for t in e.turns} for e in group.episodes]
    items = [Item(0, e, t, len(group.episodes[e].trajectories[t])) for e, t in places]
    return pack(items, {0: group}, {0: credit}, version=version, **more)


def marks(mask: torch.Tensor) -> str:
    return "".join("x" if m else "." for m in mask.tolist())


def test_two_turns_of_one_trajectory_and_a_version_change() -> None:
    group = Group(7, 0, 0, "test", (episode([draw("ccs1ssccs2s")], [(0, 0, 5, 0.0), (1, 0, 9, 1.0)], group=7),))
    batch = packed(group, (0, 0))
    #                      c c s s s c c s s
    assert marks(batch.mask) == "..xxx..xx"
    assert batch.tokens.tolist() == list(range(10, 19))
    assert batch.positions.tolist() == list(range(9))
    assert batch.turns.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.staleness.tolist() == [0, 0, 3, 2, 2, 0, 0, 2, 1]
    assert batch.behaviour.tolist() == pytest.approx([0, 0, -0.3, -0.4, -0.5, 0, 0, -0.8, -0.9])
    assert batch.credit.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert batch.episode_tokens.tolist() == [5.0] * 9
    assert set(batch.groups.tolist()) == {7}


def test_what_is_not_trained() -> None:
    """Untrained samples, greedy tokens, tokens of no action, the first token."""
    group = Group(
        0,
        0,
        0,
        "test",
        (
            episode([draw("scsuss")], [(0, 0, 5, 1.0)]),
            episode([draw("css", temperature=0.0)], [(0, 0, 3, 1.0)], sample=1),
        ),
    )
    assert marks(packed(group, (0, 0)).mask) == "..x.x."
    greedy = packed(group, (1, 0))
    assert marks(greedy.mask) == "..."
    assert greedy.temperatures.tolist() == [1, 1, 1]


def test_sequences_of_one_episode_share_its_count_wherever_they_lie() -> None:
    two = episode([draw("css"), draw("csss")], [(0, 0, 3, 0.0), (1, 1, 4, 1.0)])
    other = episode([draw("cs", temperature=0.5)], [(0, 0, 2, 1.0)], sample=1)
    group = Group(0, 0, 0, "test", (two, other))
    batch = packed(group, (0, 1), (1, 0))
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.episode_tokens.tolist() == [5, 5, 5, 5, 1, 1]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert len(set(batch.episodes.tolist())) == 2
    assert batch.temperatures.tolist() == [1, 1, 1, 1, 1, 0.5]
    assert packed(group, (0, 0)).episodes[0] == batch.episodes[0]


def test_demonstrations_are_trained_by_imitation_alone() -> None:
    group = Group(0, 0, 0, "test", (episode([draw("ccddcd")], []),))
    assert marks(packed(group, (0, 0), demonstrations=True).mask) == "..xx.x"
    assert marks(packed(group, (0, 0)).mask) == "......"


def test_a_dummy_has_the_form_of_a_batch() -> None:
    dummy = pack([], {}, {}, version=0)
    assert len(dummy.tokens) == 2
    assert not bool(dummy.mask.any())
    assert report.local_counts([[dummy]]).tolist() == [0, 0, 0, 0, 0]


def test_bytes_of_another_take_are_refused() -> None:
    group = Group(0, 0, 0, "test", (episode([draw("css")], [(0, 0, 3, 1.0)]),))
    for item in (Item(0, 0, 0, 4), Item(0, 1, 0, 3), Item(0, 0, 1, 3)):
        with pytest.raises(RunError, match="manifest"):
            pack([item], {0: group}, {0: [{0: 1.0}] * 2}, version=0)


def entry(reward: Any, lengths: list[int] | None = None, stop: str = "finished") -> dict[str, Any]:
    return {
        "sample": 0,
        "scored": reward is not None,
        "reward": reward,
        "stop": stop,
        "turns": [],
        "trajectories": [{"length": n + 1, "sampled": n, "abandoned": False} for n in lengths or []],
    }


def read(*entries: dict[str, Any]) -> manifest.Manifest:
    groups = [{"id": 0, "env": "test", "episodes": list(entries)}]
    return manifest.parse({"take": 1, "step": 1, "version": "1.0", "cursor": {}, "groups": groups})


def test_rewards_are_finite_numbers_or_none(numerics: Case) -> None:
    for reward in numerics["F31"]["input"]["rewards"]:
        reward = float(reward) if reward in ("nan", "inf") else reward
        good = reward is None or (isinstance(reward, float) and abs(reward) < 2)
        if good:
            assert read(entry(reward)).groups[0].episodes[0].reward == reward
        else:
            with pytest.raises(RunError, match="reward"):
                read(entry(reward))

    with pytest.raises(RunError, match="reward"):
        read(entry(10 ** numerics["N06"]["input"]["digits"]))


def test_what_is_left_out_for_its_length_is_in_no_denominator(numerics: Case) -> None:
    case, expected = numerics["N04"]["input"], numerics["N04"]["expected"]
    episodes = []
    for sample, pictures in enumerate(case["episodes"]):
        turns = [(t, t, len(draw(p)), float(t == 0)) for t, p in enumerate(pictures)]
        episodes.append(episode([draw(p) for p in pictures], turns, sample=sample))
    group = Group(0, 0, 0, "test", tuple(episodes))
    plan = make_plan(describe([group], 0), ranks=2, minibatches=1, budget=5, longest=case["longest"])
    assert plan.overlong == 2
    credits = [[{t.index: 1.0 for t in e.turns} for e in group.episodes]]
    passes = [
        pack(p, {0: group}, {0: credits[0]}, version=0, longest=case["longest"]) for r in plan.passes[0] for p in r
    ]
    _, _, trained, _, count = report.local_counts([passes]).tolist()
    assert (trained, count) == (expected["trained"], pytest.approx(expected["episodes"]))
    weights = torch.cat(
        [token_weights(b.mask, b.episode_tokens, Denominators(trained, round(count)), "sequence_mean") for b in passes]
    )
    assert weights[weights > 0].sort(descending=True).values.tolist() == expected["sequence_mean_weights"]
    assert {n for b in passes for n in b.episode_tokens[b.mask].tolist()} == set(expected["episode_tokens"])


def test_empty_episode_is_in_the_group_mean_and_adds_no_token(numerics: Case) -> None:
    case = numerics["F10"]["input"]
    taken = read(*(entry(float(r), [n]) for n, r in zip(case["lengths"], case["rewards"], strict=True)))
    metrics = report.rollout_metrics(taken)
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["length/mean"] == pytest.approx(5 / 3)


def test_lengths_are_reported_before_masking(numerics: Case) -> None:
    case = numerics["F16"]
    stops = [Stop.MAX_TOKENS.value if cut else Stop.FINISHED.value for cut in case["input"]["truncated"]]
    entries = [entry(0.0, [n], stop) for n, stop in zip(case["input"]["lengths"], stops, strict=True)]
    metrics = report.rollout_metrics(read(*entries))
    expected = case["expected"]
    assert metrics["length/mean"] == expected["mean_length"]
    assert metrics["length/max"] == expected["max_length"]
    assert metrics["episodes/truncated_share"] == expected["truncated_share"]
