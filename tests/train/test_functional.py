"""Every formula against a few lines of numpy, and the recorded numeric failures of other systems."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.train import functional as F
from agentrl.train.functional import Denominators

Case = dict[str, dict[str, Any]]


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def narrow(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def on(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bool)


def random_policies(seed: int, n: int = 200) -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(seed)
    new, prox, behave = (-rng.uniform(0.05, 4, n) for _ in range(3))
    return new, prox, behave, rng.normal(size=n), rng.random(n) < 0.7


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("correction", ["truncate", "mask", "off"])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_decoupled_ppo_oracle(seed: int, correction: Literal["truncate", "mask", "off"], dual: float | None) -> None:
    new, prox, behave, advantage, mask = random_policies(seed)
    u, w = np.exp(new - prox), np.exp(prox - behave)
    if correction == "truncate":
        w = np.minimum(w, 2.0)
    elif correction == "mask":
        w = np.where((w > 2.0) | (w < 0.5), 0, w)
    else:
        w = np.ones_like(w)
    gain = np.minimum(u * advantage, np.clip(u, 0.8, 1.3) * advantage)
    if dual is not None:
        gain = np.where(advantage < 0, np.maximum(gain, dual * advantage), gain)
    expected = np.where(mask, -w * gain, 0)

    found = F.decoupled_ppo(
        narrow(new),
        narrow(prox),
        narrow(behave),
        narrow(advantage),
        torch.tensor(mask),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual,
        correction=correction,
        cap=2.0,
    )
    np.testing.assert_allclose(found.loss.numpy(), expected, rtol=2e-5, atol=1e-6)


def test_plain_ppo_where_proximal_is_behaviour() -> None:
    new, prox, _, advantage, _ = random_policies(1)
    u = np.exp(new - prox)
    expected = -np.minimum(u * advantage, np.clip(u, 0.8, 1.2) * advantage)
    found = F.decoupled_ppo(narrow(new), narrow(prox), narrow(prox), narrow(advantage), on(len(new)))
    np.testing.assert_allclose(found.loss.numpy(), expected, rtol=2e-5, atol=1e-6)
    assert bool((found.weight == 1).all())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_oracle(estimator: Literal["k1", "k2", "k3"]) -> None:
    new, reference, _, _, mask = random_policies(2)
    d = new - reference
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
    found = F.kl(torch.tensor(new), torch.tensor(reference), torch.tensor(mask), estimator)
    np.testing.assert_allclose(found.numpy(), np.where(mask, expected, 0), rtol=1e-4, atol=1e-5)


def test_gather_logprobs_oracle() -> None:
    rng = np.random.default_rng(3)
    logits, tokens, heat = rng.normal(size=(9, 17)) * 5, rng.integers(0, 17, 9), rng.uniform(0.3, 2, 9)
    z = logits / heat[:, None]
    expected = z[np.arange(9), tokens] - np.log(np.exp(z).sum(1))
    found = F.gather_logprobs(torch.tensor(logits), torch.tensor(tokens), torch.tensor(heat, dtype=torch.float32))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


@given(st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=16))
def test_group_advantages_oracle(returns: list[float | None]) -> None:
    known = np.array([r for r in returns if r is not None])
    n = len(known)
    for baseline in ("group_std", "group_mean", "leave_one_out", "none"):
        found = F.group_advantages(returns, baseline)
        assert all(math.isfinite(a) for a in found)
        assert all(a == 0 for a, r in zip(found, returns, strict=True) if r is None)
        got = np.array([a for a, r in zip(found, returns, strict=True) if r is not None])
        if baseline == "none":
            expected = known
        elif n < 2 or np.ptp(known) == 0:
            expected = np.zeros(n)
        elif baseline == "leave_one_out":
            expected = np.array([known[i] - np.delete(known, i).mean() for i in range(n)])
        else:
            scale = known.std(ddof=1) + 1e-6 if baseline == "group_std" else 1.0
            expected = (known - known.mean()) / scale
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("id", ["F01", "F03"])
def test_equal_or_lonely_rewards_have_no_advantage(numerics: Case, id: str) -> None:
    case = numerics[id]
    assert F.group_advantages(case["input"]["rewards"], "group_std") == case["expected"]["advantages"]


@pytest.mark.parametrize("baseline", ["group_std", "group_mean", "leave_one_out"])
def test_equal_rewards_leave_no_rounding_errors(
    numerics: Case, baseline: Literal["group_std", "group_mean", "leave_one_out"]
) -> None:
    case = numerics["N02"]
    for rewards, largest in zip(case["input"]["groups"], case["expected"]["largest"], strict=True):
        assert max(map(abs, F.group_advantages(rewards, baseline))) <= largest
        turns = [None if r is None else {0: r, 2: 2 * r} for r in rewards]
        assert max(abs(a) for e in F.turn_advantages(turns, baseline) for a in e.values()) <= largest


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_return_that_is_no_number_is_refused(odd: float) -> None:
    for baseline in ("group_std", "group_mean", "leave_one_out", "none"):
        with pytest.raises(ValueError, match="not a finite number"):
            F.group_advantages([1.0, odd, None], baseline)
        with pytest.raises(ValueError, match="not a finite number"):
            F.turn_advantages([{0: 1.0}, {0: 0.0, 3: odd}], baseline)


@pytest.mark.parametrize("baseline", ["group_std", "group_mean", "leave_one_out"])
def test_large_rewards_end_nothing(
    numerics: Case, baseline: Literal["group_std", "group_mean", "leave_one_out"]
) -> None:
    rewards, signs = numerics["N03"]["input"]["rewards"], numerics["N03"]["expected"]["signs"]
    by_turn = [e[0] for e in F.turn_advantages([{0: r} for r in rewards], baseline)]
    for found in (F.group_advantages(rewards, baseline), by_turn):
        assert [math.copysign(1, a) for a in found] == signs


def test_means_are_taken_in_float32(numerics: Case) -> None:
    case = numerics["N05"]["input"]
    for dtype in case["dtypes"]:
        values = torch.full((case["count"],), case["value"], dtype=vars(torch)[dtype])
        assert F.masked_mean(values, on(len(values))).item() == numerics["N05"]["expected"]["mean"]


def test_missing_reward_stays_out_of_the_baseline(numerics: Case) -> None:
    case = numerics["F04"]
    for rewards, mean, mask in zip(
        case["input"]["groups"], case["expected"]["group_means"], case["expected"]["mask"], strict=True
    ):
        found = F.group_advantages(rewards, "group_mean")
        expected = [(r - mean) * m if r is not None else 0.0 for r, m in zip(rewards, mask, strict=True)]
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_log_ratio_stays_finite(numerics: Case, dtype: torch.dtype) -> None:
    case = numerics["F06"]["input"]
    for old_is in ("proximal", "behaviour"):
        new = torch.tensor(case["logp_new"], dtype=dtype, requires_grad=True)
        old = torch.tensor(case["logp_old"], dtype=dtype)
        proximal = old if old_is == "proximal" else new.detach()
        loss = F.decoupled_ppo(new, proximal, old, torch.tensor(case["advantage"]), on(1), correction="mask").loss.sum()
        torch.autograd.backward(loss)
        assert loss.item() == 0
        assert new.grad is not None
        assert bool(torch.isfinite(new.grad).all())


@pytest.mark.parametrize("sentinel", [-1e10, float("-inf"), float("nan"), float("inf")])
def test_masked_sentinel_reaches_nothing(numerics: Case, sentinel: float) -> None:
    case = numerics["F08"]
    new = torch.tensor(case["input"]["logp_new"])
    new[1] = sentinel
    new.requires_grad_(True)
    mask = torch.tensor(case["input"]["mask"], dtype=torch.bool)
    found = F.masked_mean(F.kl(new, torch.tensor(case["input"]["logp_ref"]), mask, "k3"), mask)
    assert found.item() == pytest.approx(case["expected"]["kl_k3_masked_mean"], rel=1e-4)
    terms = F.decoupled_ppo(new, new.detach(), new.detach(), t(1.0, 1.0), mask)
    torch.autograd.backward(found + terms.loss.sum())
    assert new.grad is not None
    assert bool(torch.isfinite(new.grad).all())
    assert new.grad[1] == 0


def test_batch_without_a_token_gives_zero_in_the_graph(numerics: Case) -> None:
    mask = torch.tensor(numerics["F11"]["input"]["mask"], dtype=torch.bool).flatten()
    new = torch.full((4,), -1.0, requires_grad=True)
    terms = F.decoupled_ppo(new, new.detach(), new.detach(), torch.ones(4), mask)
    loss = (F.token_weights(mask, torch.zeros(4), Denominators(0, 0), "token_mean") * terms.loss).sum()
    assert loss.item() == 0
    torch.autograd.backward(loss)
    assert new.grad is not None
    assert new.grad.tolist() == [0, 0, 0, 0]


def test_token_mean_does_not_depend_on_the_cut(numerics: Case) -> None:
    case = numerics["F12"]
    losses = [torch.tensor(x, dtype=torch.float32) for x in case["input"]["token_losses"]]
    total = Denominators(sum(len(x) for x in losses), len(losses))
    for split in case["input"]["splits"]:
        parts = []
        for micro in split:
            joined = torch.cat([losses[i] for i in micro])
            lengths = torch.cat([torch.full((len(losses[i]),), float(len(losses[i]))) for i in micro])
            parts.append((F.token_weights(on(len(joined)), lengths, total, "token_mean") * joined).sum())
        assert float(sum(parts)) == pytest.approx(case["expected"]["loss"])


def test_left_out_tokens_are_not_in_the_denominator(numerics: Case) -> None:
    case = numerics["F14"]
    n, truncated = case["input"]["n_tokens"], case["input"]["n_truncated"]
    mask = torch.arange(n) >= truncated
    weights = F.token_weights(mask, torch.full((n,), float(n)), Denominators(float(mask.sum()), 1), "token_mean")
    assert float((weights * case["input"]["token_loss"]).sum()) == pytest.approx(case["expected"]["loss"])


@pytest.mark.parametrize("id", ["F17", "F19"])
def test_three_policies(numerics: Case, id: str) -> None:
    given_, expected = numerics[id]["input"], numerics[id]["expected"]
    new = torch.tensor([given_["logp_new"]], requires_grad=True)
    eps = given_["clip"]
    terms = F.decoupled_ppo(
        new,
        t(given_["logp_prox"]),
        t(given_["logp_behave"]),
        t(given_["advantage"]),
        on(1),
        clip_low=eps,
        clip_high=eps,
    )
    torch.autograd.backward(terms.loss.sum())
    assert new.grad is not None
    assert terms.ratio.item() == pytest.approx(expected["ratio"], rel=1e-5)
    assert terms.loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    if "behave_weight" in expected:
        assert terms.weight.item() == pytest.approx(expected["behave_weight"], rel=1e-5)
    if "grad_wrt_logp_new" in expected:
        assert new.grad.item() == expected["grad_wrt_logp_new"]


def test_temperature(numerics: Case) -> None:
    given_, expected = numerics["F21"]["input"], numerics["F21"]["expected"]
    logits, token = torch.tensor([given_["logits"]]), torch.tensor([given_["token"]])
    assert F.gather_logprobs(logits, token, t(given_["temperature"])).item() == pytest.approx(
        expected["logp_at_T"], rel=1e-5
    )
    assert F.gather_logprobs(logits, token).item() == pytest.approx(expected["logp_at_1"], rel=1e-5)


def test_differences_are_taken_in_float32(numerics: Case) -> None:
    logp = numerics["F24"]["input"]["logp"]
    half = torch.tensor([logp], dtype=torch.bfloat16)
    assert F.log_ratio(half, half, on(1)).dtype is torch.float32
    # What one side lost to bfloat16 is not lost again in the subtraction.
    ratio = F.log_ratio(half, t(logp), on(1)).exp().item()
    assert ratio == pytest.approx(numerics["F24"]["expected"]["ratio_error_factor"], rel=1e-4)


def test_untrained_tokens_add_nothing_to_the_kl(numerics: Case) -> None:
    given_, expected = numerics["F25"]["input"], numerics["F25"]["expected"]
    mask = torch.tensor(given_["mask"], dtype=torch.bool)
    kl = F.kl(torch.tensor(given_["kl"]), torch.zeros(3), mask, "k1")
    assert given_["beta"] * kl.sum().item() == pytest.approx(expected["total_kl_penalty"])


def test_equal_rewards_give_no_policy_gradient(numerics: Case) -> None:
    advantages = F.group_advantages(numerics["F27"]["input"]["rewards"], "group_std")
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    torch.autograd.backward(F.decoupled_ppo(new, t(-1.5, -1.5), t(-1.5, -1.5), t(*advantages), on(2)).loss.sum())
    assert new.grad is not None
    assert new.grad.abs().max() == numerics["F27"]["expected"]["policy_term_grad"]


def test_aggregations(numerics: Case) -> None:
    given_, expected = numerics["F29"]["input"], numerics["F29"]["expected"]
    lengths = given_["lengths"]
    loss = torch.cat([torch.full((n,), -a) for n, a in zip(lengths, given_["advantages"], strict=True)])
    per_episode = torch.cat([torch.full((n,), float(n)) for n in lengths])
    total = Denominators(sum(lengths), len(lengths))
    for name, key in (
        ("token_mean", "token_mean_loss"),
        ("sequence_mean", "per_sequence_mean_loss"),
        ("fixed_length", "fixed_budget_loss"),
    ):
        weights = F.token_weights(on(len(loss)), per_episode, total, name, given_["max_len"])  # type: ignore[arg-type]
        assert float((weights * loss).sum()) == pytest.approx(expected[key], abs=1e-6)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1e10])
def test_whatever_stands_off_the_mask_reaches_no_gradient(odd: float) -> None:
    """In any of the arguments, of any of the objectives."""
    mask, sequences = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])
    clean = torch.tensor([-1.0, 0.0, -2.0])
    dirty = torch.where(mask, clean, odd)

    def gradients(x: Tensor, filling: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        losses = [
            F.ppo_gain(x, filling, filling, mask, dual_clip=3.0).gain,
            F.gspo_gain(x, filling, filling, mask, sequences, clip_low=0.2, clip_high=0.2).gain,
            F.cispo_gain(x, filling, filling, mask, clip_low=1.0, clip_high=4.0).gain,
            F.kl(x, filling, mask, "k3"),
            F.value_loss(x, filling, filling, mask, 0.2),
        ]
        return [*(torch.autograd.grad(loss.sum(), x, retain_graph=True)[0] for loss in losses), *losses]

    for found, expected in zip(gradients(dirty, dirty), gradients(clean, clean), strict=True):
        torch.testing.assert_close(found, expected)
