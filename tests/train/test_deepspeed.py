"""ZeRO-3 on two ranks and on one: the same mathematics as one process with AdamW, and a state that survives."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.errors import ConfigError
from agentrl.train import checkpoint
from agentrl.train.export import Shape, buckets

ROOT = Path(__file__).parent.parent.parent
Case = dict[str, dict[str, Any]]


class Outcome(NamedTuple):
    work: Path
    results: dict[tuple[int, int], dict[str, Any]]


def start(world: int, job: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        with (job.parent / f"log-{world}-{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.train.worker", str(job)],
                    cwd=ROOT,
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Outcome:
    """Two ranks; and one that does the same, and goes on from what they saved."""
    work = tmp_path_factory.mktemp("group")
    job = work / "job.json"
    job.write_text(json.dumps({"model": str(tiny), "work": str(work)}))
    groups = {world: start(world, job) for world in (2, 1)}
    results = {}
    try:
        for world, processes in groups.items():
            for rank, process in enumerate(processes):
                code = process.wait(120)
                assert code == 0, (work / f"log-{world}-{rank}").read_text()[-3000:]
                results[world, rank] = json.loads((work / f"result-{world}-{rank}.json").read_text())
    finally:
        for process in itertools.chain(*groups.values()):
            process.kill()
            process.wait()
    return Outcome(work, results)


RANKS = [(2, 0), (2, 1)]


def distance(outcome: Outcome, one: str, other: str) -> float:
    a, b = (load_file(outcome.work / f"weights-{name}.safetensors") for name in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


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


def test_imitation(outcome: Outcome) -> None:
    for place in RANKS:
        nll = outcome.results[place]["nll"]
        assert nll[0] == pytest.approx(5.55, abs=0.5), "close to uniform over the vocabulary"
        assert nll[-1] < 0.7 * nll[0]
        assert outcome.results[place]["nll_loss"] == pytest.approx(nll, rel=1e-5)


def test_fp16_finds_its_loss_scale_or_is_refused(outcome: Outcome) -> None:
    for place in RANKS:
        found = outcome.results[place]
        if not torch.cuda.is_available():
            assert "use 'bf16'" in found["fp16_refused"]
            continue
        applied, steps, last = found["fp16_applied"]
        assert last
        assert applied == steps
        assert found["fp16_state"] == ["torch.float32"]
        assert found["fp16_scaler"][0] == found["fp16_scaler"][1]


def test_recomputed_activations_change_nothing(outcome: Outcome) -> None:
    for place in RANKS:
        assert outcome.results[place]["recompute_distance"] < 1e-6


def test_a_full_disk_on_one_rank_ends_all_with_the_cause(outcome: Outcome) -> None:
    assert "No space left" in outcome.results[2, 1]["full_disk"]
    assert "another rank" in outcome.results[2, 0]["full_disk"]
    assert "--resume" in outcome.results[2, 1]["full_disk"]


@pytest.mark.parametrize("world", [1, 2])
def test_an_export_gives_the_trainers_own_logprobs(outcome: Outcome, world: int) -> None:
    assert outcome.results[world, 0]["buckets_agree"]
    folder = outcome.work / f"export-{world}"
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o644}
    assert all(t.numel() > 0 for t in load_file(folder / "model.safetensors").values())
    model = AutoModelForCausalLM.from_pretrained(folder)
    probe = load_file(outcome.work / f"probe-{world}.safetensors")
    bounds = probe["seqlens"].tolist()
    for start_, end in itertools.pairwise(bounds):
        tokens = probe["tokens"][start_:end]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        expected = logits.log_softmax(1).gather(1, tokens[1:, None]).squeeze(1)
        mask = probe["mask"][start_ + 1 : end]
        torch.testing.assert_close(probe["logprobs"][start_ + 1 : end][mask], expected[mask], atol=1e-4, rtol=1e-4)


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
