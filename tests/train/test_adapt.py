"""Frozen weights and adapters: what is trained, what is published, and that it is the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import ConfigError
from agentrl.train.adapt import choose_trained, other_base, sources
from agentrl.train.model import Policy, load_policy
from agentrl.train.options import LoraOptions, TrainOptions
from tests.train.group import SECONDS, Outcome, check_export, distance, run_groups
from tests.train.test_model import PICTURES, batch


def adapted(folder: Path, options: TrainOptions) -> Policy:
    policy = load_policy(folder, torch.float32)
    choose_trained(policy.model, options, seed=1)
    return policy


def trained(policy: Policy) -> set[str]:
    return {name for name, p in policy.model.named_parameters() if p.requires_grad}


def test_patterns_choose_what_is_trained(tiny: Path) -> None:
    everything = trained(adapted(tiny, TrainOptions()))
    attention = trained(adapted(tiny, TrainOptions(trainable=("*.self_attn.*",))))
    assert attention == {name for name in everything if ".self_attn." in name}
    upper = trained(adapted(tiny, TrainOptions(frozen=("model.layers.0.*", "model.embed_tokens.weight"))))
    assert upper == {name for name in everything if ".layers.1." in name or name == "model.norm.weight"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (TrainOptions(trainable=("*.attention.*",)), r"train.trainable: '\*.attention.\*' matches none"),
        (TrainOptions(frozen=("lm_head.weight",)), "train.frozen: 'lm_head.weight' matches none"),
        (TrainOptions(frozen=("*",)), "leaves none of 20 weights to train"),
        (TrainOptions(lora=LoraOptions(targets=("*.norm",))), r"train.lora.targets: '\*.norm' matches none"),
        (TrainOptions(lora=LoraOptions(targets=("lm_head",))), "train.lora.targets: 'lm_head' matches none"),
    ],
)
def test_a_pattern_without_effect_is_refused(tiny: Path, options: TrainOptions, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        adapted(tiny, options)


def test_fresh_adapters_change_nothing_and_trained_ones_are_merged(tiny: Path, tmp_path: Path) -> None:
    """The published weights, loaded as a plain model, say what the model with adapters says."""
    plain = load_policy(tiny, torch.float32)
    policy = adapted(tiny, TrainOptions(lora=LoraOptions(rank=3, alpha=7.0, targets=("*.q_proj", "*.down_proj"))))
    names = trained(policy)
    assert len(names) == 8
    assert all(".lora_" in name for name in names)
    shown = batch(*PICTURES)
    torch.testing.assert_close(policy(shown).logprobs, plain(shown).logprobs)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in names:
                parameter.add_(torch.randn_like(parameter))
        moved = policy(shown).logprobs
        assert float((moved - plain(shown).logprobs).abs().max()) > 0.1
    published = {name: source.whole() for name, source in sources(policy.model).items()}
    plain.model.load_state_dict(published, strict=False)
    assert set(published) == {name for name, _ in plain.model.named_parameters()}
    torch.testing.assert_close(plain(shown).logprobs.detach(), moved, atol=1e-4, rtol=1e-4)


def test_adapters_are_the_same_at_every_start(tiny: Path) -> None:
    one, other = (adapted(tiny, TrainOptions(lora=LoraOptions())) for _ in range(2))
    for (name, a), (_, b) in zip(one.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_trained_weights_rest_on_the_same_others() -> None:
    now = {"lora": None, "dtype": "bf16", "frozen": {"a": [0.0, 0.0], "b": [-3.0, 50.0]}}
    assert other_base(None, now) is None, "older checkpoints do not tell"
    assert other_base({**now, "frozen": {"a": [0.0, 0.0], "b": [-3.0 + 1e-9, 50.0]}}, now) is None, (
        "another order of sums"
    )
    assert other_base({**now, "dtype": "fp32", "frozen": {"a": [0.0, 0.0], "b": [-3.1, 51.0]}}, now) is None
    for frozen in ({"a": [0.0, 0.0], "b": [-3.0, 50.001]}, {"a": [0.0, 0.0], "b": [-3.001, 50.0]}, {"b": [-3.0, 50.0]}):
        assert "frozen" in (other_base({**now, "frozen": frozen}, now) or "")
    lora = {"rank": 4, "alpha": 8.0}
    assert "set it back" in (other_base({**now, "lora": lora}, now) or "")
    assert other_base({**now, "lora": lora}, {**now, "lora": lora}) is None


PARTS = ["frozen", "lora", "offloaded"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Outcome:
    both = [*(f"partly:{part}" for part in PARTS), "other_number_of_ranks:lora", "other_number_of_ranks:offloaded"]
    checks = {2: [*both, "fp16", "recomputed_activations"], 1: both}
    return run_groups(tmp_path_factory.mktemp("adapt"), tiny, checks)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("part", PARTS)
def test_any_part_trains_as_in_one_process_resumes_exactly_and_is_published_whole(outcome: Outcome, part: str) -> None:
    start = load_file(outcome.work / "frozen-1" / "step-0000002" / "model" / "model.safetensors")
    for place, found in outcome.results.items():
        assert found[part]["resume_is_exact"], place
        says = {"lora": ["train.lora = {'rank': 2, 'alpha': 8.0}", "the frozen"], "frozen": ["the frozen"]}
        assert [w in said for w, said in zip(says.get(part, []), found[part]["refused"], strict=True)].count(False) == 0
    for world in (1, 2):
        found = outcome.results[world, 0][part]
        assert found["distance_to_adamw"] < 1e-5
        check_export(outcome.work / f"export-{part}-{world}", outcome.work / f"probe-{part}-{world}.safetensors")
        still = set(start) - set(found["moved"])
        if part == "frozen":
            assert still == {name for name in start if ".layers.0." in name or ".embed_tokens." in name}
        elif part == "lora":
            assert still == {name for name in start if "norm" in name or ".embed_tokens." in name}
        else:
            assert still == set()
    assert distance(outcome, f"{part}-1", f"{part}-2") < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("part", ["lora", "offloaded"])
def test_another_number_of_ranks_goes_on_from_a_checkpoint(outcome: Outcome, part: str) -> None:
    assert distance(outcome, f"{part}-2-then-1", f"{part}-2") < 1e-5
    assert distance(outcome, f"{part}-1-then-2", f"{part}-1") < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_fp16_has_fp32_master_and_moments_and_keeps_its_loss_scale(outcome: Outcome) -> None:
    for rank in (0, 1):
        found = outcome.results[2, rank]
        assert "use 'bf16'" in found["fp16_refused"], "where neither GPU nor processor has fp16"
        applied, steps, last = found["fp16_applied"]
        assert last
        assert applied == steps
        assert found["fp16_weights"] == ["torch.float16"]
        assert found["fp16_state"] == ["torch.float32"]
        assert found["fp16_scaler"][0] == found["fp16_scaler"][1]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_recomputed_activations_change_nothing(outcome: Outcome) -> None:
    for rank in (0, 1):
        assert outcome.results[2, rank]["recompute_distance"] < 1e-6
