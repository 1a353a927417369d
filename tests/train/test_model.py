"""Packed = unpacked, and log-probs in chunks = log-probs from whole logits, with their gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from agentrl.errors import ConfigError
from agentrl.train import algorithm
from agentrl.train import model as module
from agentrl.train.batch import Batch, pack
from agentrl.train.model import (
    Policy,
    TokenLogprobs,
    check_exact,
    load_policy,
    longest_sequence,
)
from agentrl.train.options import AlgorithmOptions
from agentrl.train.plan import Item
from agentrl.types import Group
from tests.train.drawing import draw, episode


def reference(hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    logp = ((hidden @ weight.t() + bias) / heat[:, None]).log_softmax(1)
    return logp.gather(1, tokens[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("chunk", [1 << 22, 100, 1])
def test_chunked_logprobs_and_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    torch.manual_seed(0)
    leaves = [torch.randn(13, 8), torch.randn(31, 8), torch.randn(31)]
    ours, theirs = ([x.clone().requires_grad_() for x in leaves] for _ in range(2))
    tokens, heat = torch.randint(0, 31, (13,)), torch.rand(13) + 0.5
    factors = torch.randn(2, 13)
    for wanted in ((0,), (1,), (0, 1)):
        found = TokenLogprobs.apply(*ours, tokens, heat)  # type: ignore[no-untyped-call]
        expected = reference(theirs[0], theirs[1], theirs[2], tokens, heat)
        for i in (0, 1):
            torch.testing.assert_close(found[i], expected[i], atol=1e-5, rtol=1e-5)
        for outputs in (found, expected):
            torch.autograd.backward(torch.stack([(factors[i] * outputs[i]).sum() for i in wanted]).sum())
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-4)


def test_a_token_that_is_ruled_out_leaves_the_entropy_alone(numerics: dict[str, dict[str, Any]]) -> None:
    """As a vocabulary without it has."""
    case = numerics["N01"]["input"]
    bias, heat = torch.tensor([float(b) for b in case["bias"]]), torch.full((4,), case["temperature"])
    kept, tokens = bias > -torch.inf, torch.tensor([0, 2, 1, 0])
    torch.manual_seed(0)
    whole = [torch.randn(4, 6), torch.randn(5, 6), bias]
    less = [whole[0], whole[1][kept], bias[kept]]
    found = []
    for leaves in (whole, less):
        leaves = [x.clone().requires_grad_() for x in leaves]
        logprobs, entropy = TokenLogprobs.apply(*leaves, tokens, heat)  # type: ignore[no-untyped-call]
        assert float(entropy.detach().max()) <= numerics["N01"]["expected"]["entropy_at_most"]
        grads = torch.autograd.grad((logprobs + 2 * entropy).sum(), leaves)
        found.append(
            [logprobs, entropy, grads[0], *(g[:3] for g in grads[1:]), *(g[3:].abs().sum() for g in grads[1:])]
        )
    for with_it, without in zip(*found, strict=True):
        torch.testing.assert_close(with_it, without)


def batch(*pictures: str, apart: int = 7) -> Batch:
    """Tokens at one place differ by `apart` from one sequence to the next."""
    episodes = [
        episode([draw(p, first=20 + apart * i)], [(0, 0, len(draw(p)), 1.0)], sample=i) for i, p in enumerate(pictures)
    ]
    items = [Item(0, i, 0, len(draw(p))) for i, p in enumerate(pictures)]
    return pack(items, {0: Group(0, 0, 0, "test", tuple(episodes))}, {0: [{0: 1.0}] * len(pictures)}, version=0)


PICTURES = ("ccssccs", "css", "c" * 9 + "s" * 12, "csscs")


def gradients(policy: Policy, batches: list[Batch]) -> dict[str, Tensor]:
    policy.zero_grad()
    for b in batches:
        out = policy(b)
        torch.autograd.backward((out.logprobs * torch.sin(b.tokens.float())).sum())
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["tiny", "untied"])
def test_packed_is_unpacked(request: pytest.FixtureRequest, family: str) -> None:
    folder: Path = request.getfixturevalue(family)
    policy = load_policy(folder, torch.float32)
    check_exact(policy, 200, torch.device("cpu"))
    together, alone = batch(*PICTURES), [pack_one(i) for i in range(len(PICTURES))]
    torch.testing.assert_close(
        policy(together).logprobs, torch.cat([policy(b).logprobs for b in alone]), atol=1e-5, rtol=1e-5
    )
    a, b = gradients(policy, [together]), gradients(policy, alone)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-4, msg=name)


def test_what_sequences_share_is_computed_once_and_trains_as_if_each_had_its_own(tiny: Path) -> None:
    """Prompts of a group, a turn that branches have in common, and tokens after the last trained one."""
    policy, pictures = load_policy(tiny, torch.float32), ("ccssccs", "css", "ccsscc", "ccsuscs")
    computed = []
    cast(Any, policy.model).base_model.register_forward_pre_hook(
        lambda _module, _args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    together = batch(*pictures, apart=0)
    alone = [cut(together, i) for i in range(len(pictures))]
    torch.testing.assert_close(
        policy(together).logprobs, torch.cat([policy(b).logprobs for b in alone]), atol=1e-5, rtol=1e-5
    )
    assert computed == [6, 6, 2, 3, 6]
    a, b = gradients(policy, [together]), gradients(policy, alone)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-4, msg=name)


FEW = ("cccccccss", "ccccscccccs", "ccccccssccccs", "ccccccccccccs")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("apart", "read"), [(0, 6), (7, 8)])
def test_the_last_layer_computes_what_is_read_and_trains_as_a_whole_one(
    tiny: Path, checkpointing: bool, apart: int, read: int
) -> None:
    found, seen = [], []
    for whole in (False, True):
        policy = load_policy(tiny, torch.float32, checkpointing=checkpointing)
        policy.train()
        check_exact(policy, 200, torch.device("cpu"))
        assert policy.last is not None
        if whole:
            policy.last.remove()
            policy.last = None
        cast(Any, policy.model).base_model.layers[-1].mlp.gate_proj.register_forward_pre_hook(
            lambda _module, args: seen.append(args[0].shape[1])
        )
        shown = batch(*FEW, apart=apart)
        grads = gradients(policy, [batch(*FEW[:2], apart=apart), shown])
        found.append((policy(shown).logprobs, grads))
    (few, a), (among_all, b) = found
    torch.testing.assert_close(few, among_all, atol=1e-5, rtol=1e-5)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-4, msg=name)
    passes = len(seen) // 2
    assert max(seen[:passes]) == read
    assert min(seen[passes:]) > read


@pytest.mark.parametrize("kind", ["mlp first", "attention twice", "mlp by name", "router"])
def test_a_last_layer_of_another_kind_is_right_too(tiny: Path, kind: str) -> None:
    """Attention alone knows what is read; and keys of all tokens may be wanted of what comes after the MLP."""
    policy = load_policy(tiny, torch.float32)
    layer = cast(Any, policy.model).base_model.layers[-1]

    def forward(hidden: Tensor, **given: Any) -> Tensor:
        if kind != "mlp first":
            hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), **given)[0]
        given_to = {"x": layer.post_attention_layernorm(hidden)}
        said = layer.mlp(**given_to) if kind == "mlp by name" else layer.mlp(*given_to.values())
        hidden = hidden + (said[0] if kind == "router" else said)
        if kind in ("mlp first", "attention twice"):
            hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), **given)[0]
        return hidden

    plain = layer.mlp.forward
    if kind == "router":
        layer.mlp.forward = lambda x: (plain(x), x.sum(2))
    layer.forward = forward
    check_exact(policy, 200, torch.device("cpu"))
    assert (policy.last is None) == (kind == "attention twice")
    few = batch(*FEW)
    alone = torch.cat([policy(cut(few, i)).logprobs for i in range(len(FEW))])
    torch.testing.assert_close(policy(few).logprobs, alone, atol=1e-5, rtol=1e-5)


def test_a_trajectory_of_several_versions_trains_as_its_parts_would(tiny: Path) -> None:
    """Tokens of two versions in one trajectory: the gradients of the first and of the second alone, added up."""
    policy, chosen = load_policy(tiny, torch.float32), algorithm.load(AlgorithmOptions(behaviour_cap=1.5))

    def gradient(picture: str) -> dict[str, Tensor]:
        shown = batch(picture)
        shown = shown.with_weights(shown.mask / 7).with_advantages(0.7 * shown.mask)
        policy.zero_grad()
        loss, _ = chosen.loss(shown, policy(shown))
        torch.autograd.backward(loss)
        return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}

    whole, first, second = (gradient(picture) for picture in ("cc0sss1ssss", "cc0sss1uuuu", "cc0uuu1ssss"))
    assert float(first["model.model.embed_tokens.weight"].abs().max()) > 1e-4
    for name, found in whole.items():
        torch.testing.assert_close(found, first[name] + second[name], atol=1e-6, rtol=1e-5)


def pack_one(index: int) -> Batch:
    return cut(batch(*PICTURES), index)


def cut(whole: Batch, index: int) -> Batch:
    start, end = whole.cu_seqlens[index : index + 2].tolist()
    found = {
        f.name: value[start:end]
        for f in dataclasses.fields(Batch)
        if isinstance(value := getattr(whole, f.name), Tensor) and f.name != "cu_seqlens"
    }
    return dataclasses.replace(whole, **found, cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32))


def test_logprobs_are_those_of_transformers(tiny: Path) -> None:
    policy, plain = load_policy(tiny, torch.float32), AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    one = dataclasses.replace(pack_one(2), temperatures=torch.full((21,), 0.7))
    out = policy(one)
    logits = plain(input_ids=one.tokens[None], use_cache=False).logits[0, :-1] / 0.7
    expected = logits.log_softmax(1).gather(1, one.tokens[1:, None]).squeeze(1)
    torch.testing.assert_close(out.logprobs[1:], torch.where(one.mask[1:], expected, 0.0), atol=1e-5, rtol=1e-5)
    assert bool((out.entropy[one.mask] > 0).all())


def test_a_dummy_touches_every_weight_and_changes_none(tiny: Path) -> None:
    policy = load_policy(tiny, torch.float32)
    dummy = pack([], {}, {}, version=0)
    policy.zero_grad()
    torch.autograd.backward((policy(dummy).logprobs * dummy.weights).sum())
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) == 0, name


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_model_that_changes_logits_after_its_head_is_refused(tiny: Path, cap: float | None) -> None:
    """A scale, and a soft cap that a tiny model's small logits do not feel."""
    policy = load_policy(tiny, torch.float32)
    plain = policy.model.forward

    def forward(**given: Any) -> Any:
        output = plain(**given)
        output.logits = output.logits / 2 if cap is None else cap * torch.tanh(output.logits / cap)
        return output

    policy.model.forward = forward
    with pytest.raises(ConfigError, match="changes logits after its output head"):
        check_exact(policy, 200, torch.device("cpu"))


def test_rotary_embeddings_that_depend_on_the_longest_sequence_are_held_to_where_they_do_not(tmp_path: Path) -> None:
    def save(**given: Any) -> None:
        LlamaConfig(max_position_embeddings=4096, **given).save_pretrained(tmp_path)

    save()
    assert [longest_sequence(tmp_path, wanted) for wanted in (None, 100, 9000)] == [4096, 100, 9000]
    save(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert [longest_sequence(tmp_path, wanted) for wanted in (None, 4096)] == [4096, 4096]
    with pytest.raises(ConfigError, match="max_sequence = 4096"):
        longest_sequence(tmp_path, 4097)
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 1024}
    save(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **factors})
    with pytest.raises(ConfigError, match="max_sequence = 1024"):
        longest_sequence(tmp_path)
    assert longest_sequence(tmp_path, 1024) == 1024


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_policy(tmp_path, torch.float32)
