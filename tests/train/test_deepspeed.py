"""ZeRO-3 on two ranks and on one: the same mathematics as one process with AdamW, and a state that survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.train import checkpoint
from agentrl.train.export import Shape, buckets
from tests.train.group import SECONDS, Outcome, check_export, distance, run_groups

Case = dict[str, dict[str, Any]]


pytestmark = pytest.mark.timeout(SECONDS + 60)
BOTH = ["train_save_and_resume", "critic_and_reference"]
CHECKS = {
    2: [
        *BOTH,
        "nothing_moves_at_rate_zero",
        "not_finite",
        "bf16",
        "one_rank_cannot_write",
        "imitation",
        "weights_over_a_group",
    ],
    1: [*BOTH, "other_number_of_ranks"],
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Outcome:
    """Two ranks; and one that does the same, and goes on from what they saved."""
    return run_groups(tmp_path_factory.mktemp("group"), tiny, CHECKS)


RANKS = [(2, 0), (2, 1)]


def test_any_cut_and_any_number_of_ranks_train_the_same(outcome: Outcome) -> None:
    """Two ranks with many small passes, dummies among them (G01); one rank with one pass; plain AdamW."""
    assert outcome.results[2, 0]["passes"] == outcome.results[2, 1]["passes"] > 1
    assert outcome.results[1, 0]["passes"] == 1
    assert distance(outcome, "2", "1") < 1e-5
    for world in (1, 2):
        assert outcome.results[world, 0]["distance_to_adamw"] < 1e-5


def test_metrics_do_not_depend_on_the_cut(outcome: Outcome) -> None:
    for ours, theirs in zip(outcome.results[2, 0]["metrics"], outcome.results[1, 0]["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert outcome.results[2, 0]["metrics"] == outcome.results[2, 1]["metrics"]


def test_critic_and_reference_do_not_depend_on_the_ranks(outcome: Outcome) -> None:
    """Values, KL penalties and whitening of episodes whose three trajectories lie on different ranks and passes."""
    two, one = outcome.results[2, 0]["critic_metrics"], outcome.results[1, 0]["critic_metrics"]
    assert two == pytest.approx(one, rel=1e-3, abs=1e-4)
    assert one["kl/reference"] > 0
    assert one["value/mean"] != 0
    assert distance(outcome, "critic-2", "critic-1") < 1e-5
    assert outcome.results[2, 1]["critic_restored"]
    assert outcome.results[1, 0]["critic_restored"]


@pytest.mark.parametrize("place", [*RANKS, (1, 0)])
def test_resume_is_bit_exact(outcome: Outcome, place: tuple[int, int]) -> None:
    assert outcome.results[place]["resume_is_exact"]
    assert outcome.results[place]["state"] == [2, 9, {"row": 56}]


def test_one_rank_goes_on_from_what_two_saved(outcome: Outcome) -> None:
    assert distance(outcome, "2", "2-then-1") < 1e-5


def test_nothing_moves_at_rate_zero(outcome: Outcome, numerics: Case) -> None:
    expected = numerics["F23"]["expected"]
    for place in RANKS:
        metrics = outcome.results[place]["rate_zero"]
        assert outcome.results[place]["rate_zero_unmoved"]
        assert abs(metrics["ratio/max"] - 1) <= expected["max_abs_ratio_minus_1"]
        assert metrics["ratio/clip_fraction"] == expected["clip_fraction"]
        assert metrics["kl/proximal"] == pytest.approx(expected["approx_kl"], abs=1e-9)


def test_a_step_that_is_not_finite_changes_nothing(outcome: Outcome) -> None:
    for place in RANKS:
        found = outcome.results[place]
        assert not found["nan_applied"]
        assert found["nan_unmoved"]
        assert found["nan_steps"] == [1, 1]
        assert found["after_nan_applied"]


def test_bf16_has_fp32_master_and_moments(outcome: Outcome) -> None:
    for place in RANKS:
        found = outcome.results[place]
        assert found["bf16_finite"]
        assert found["bf16_state"] == ["torch.float32"]
        assert found["bf16_weights"] == ["torch.bfloat16"]
        assert found["cut"] < 2e-3, "gradients are added up in float32, however many passes there are"


def test_imitation(outcome: Outcome) -> None:
    for place in RANKS:
        nll = outcome.results[place]["nll"]
        assert nll[0] == pytest.approx(5.55, abs=0.5), "close to uniform over the vocabulary"
        assert nll[-1] < 0.7 * nll[0]
        assert outcome.results[place]["nll_loss"] == pytest.approx(nll, rel=1e-5)


def test_a_full_disk_on_one_rank_ends_all_with_the_cause(outcome: Outcome) -> None:
    assert "No space left" in outcome.results[2, 1]["full_disk"]
    assert "another rank" in outcome.results[2, 0]["full_disk"]
    assert "--resume" in outcome.results[2, 1]["full_disk"]


@pytest.mark.parametrize("world", [1, 2])
def test_an_export_gives_the_trainers_own_logprobs(outcome: Outcome, world: int) -> None:
    assert outcome.results[world, 0]["buckets_agree"]
    check_export(outcome.work / f"export-{world}", outcome.work / f"probe-{world}.safetensors")


def test_weights_go_to_a_group_bucket_by_bucket(outcome: Outcome) -> None:
    """Two ranks gather and one sends; a receiver that leaves is noticed by all, and the next time it is met again."""
    assert outcome.results[2, 0]["group_buckets"] > 4
    assert outcome.results[2, 0]["group_same"]
    for place in RANKS:
        assert outcome.results[place]["group_sent"] == [True, False, True]


def test_buckets_go_by_true_sizes(zero3_resume: Case) -> None:
    limit = int(zero3_resume["G08"]["input"]["bucket_bytes"])
    shapes = [Shape(f"w{i}", (75_000_000,), torch.float32) for i in range(3)]
    assert len(buckets(shapes, limit)) == zero3_resume["G08"]["expected"]["buckets"]
    small = [Shape(f"w{i}", (1000,), torch.float32) for i in range(10)]
    assert [len(b) for b in buckets(small, 12_000)] == [3, 3, 3, 1]


def test_a_torn_checkpoint_is_recognised_and_the_one_before_used(outcome: Outcome, tmp_path: Path) -> None:
    whole = outcome.work / "c2" / "step-0000002"
    for step, damage in ((3, "short"), (4, "missing"), (5, "flipped"), (6, "no manifest")):
        copy = tmp_path / f"step-{step:07d}"
        copy.mkdir()
        for path in whole.rglob("*"):
            if path.is_file():
                (copy / path.relative_to(whole)).parent.mkdir(exist_ok=True)
                (copy / path.relative_to(whole)).write_bytes(path.read_bytes())
        state = copy / "state-00001-of-00002.safetensors"
        data = state.read_bytes()
        if damage == "short":
            state.write_bytes(data[:-1])
        elif damage == "missing":
            state.unlink()
        elif damage == "flipped":
            state.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        else:
            (copy / "manifest.json").unlink()
        with pytest.raises(ConfigError, match="use an earlier one"):
            checkpoint.read(copy)
    assert checkpoint.newest(tmp_path)[0] is None
    whole_copy = tmp_path / "step-0000002"
    whole_copy.symlink_to(whole)
    found, refused = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.take, found.world) == (2, 9, 2)
    assert len(refused) == 4
