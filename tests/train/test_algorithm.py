"""Algorithms on packed batches: surrogates against numpy, advantages of whole episodes, what a loss is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.train import algorithm, experience
from agentrl.train import functional as F
from agentrl.train.algorithm import Algorithm, EpisodeTokens, Mean, Output
from agentrl.train.batch import Batch, pack
from agentrl.train.options import AlgorithmOptions
from agentrl.train.plan import Item, make_plan
from agentrl.types import Group, Stop
from tests.train.drawing import describe, draw, episode, random_group

Case = dict[str, dict[str, Any]]


class Predicted:
    """A backend of one rank whose policy says what it is told, by token id."""

    rank, world = 0, 1

    def __init__(self, logprobs: Tensor, reference: Tensor, values: Tensor | None = None) -> None:
        self.tables = logprobs, reference, values

    def predict(self, batches: Sequence[Batch]) -> list[Output]:
        logprobs, _, values = self.tables
        return [Output(logprobs[b.tokens], b.weights, None if values is None else values[b.tokens]) for b in batches]

    def reference(self, batches: Sequence[Batch]) -> list[Tensor]:
        return [self.tables[1][b.tokens] for b in batches]

    def sum(self, values: Tensor) -> Tensor:
        return values.clone()


def made(chosen: Algorithm, groups: list[Group], *, budget: int = 1 << 20, minibatches: int = 1) -> list[list[Batch]]:
    taken = describe(groups, 0)
    plan = make_plan(taken, ranks=1, minibatches=minibatches, budget=budget, longest=None)
    credits = {i: chosen.credit(g) for i, g in enumerate(taken.groups)}
    return [[pack(p, dict(enumerate(groups)), credits, version=0) for p in m[0]] for m in plan.passes]


def tables(seed: int = 0) -> Predicted:
    rng = torch.Generator().manual_seed(seed)
    logprobs, reference = (-5 * torch.rand(300, generator=rng) for _ in range(2))
    return Predicted(logprobs, reference, torch.randn(300, generator=rng))


def ready(chosen: Algorithm, backend: Predicted, batches: list[list[Batch]]) -> list[Batch]:
    groups = 1 + max(int(b.episodes.max()) // 1_000_000 for m in batches for b in m)
    return experience.estimate(backend, chosen, experience.predict(backend, chosen, batches), groups)[0]


def load(name: str = "grpo", **more: Any) -> Algorithm:
    return algorithm.load(AlgorithmOptions(name=name, **more))


# ---- surrogates --------------------------------------------------------------------------------------------------


def drawn(seed: int, n: int = 60) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    new, prox, behave = (torch.tensor(-rng.uniform(0.05, 3, n), dtype=torch.float32) for _ in range(3))
    advantages = torch.tensor(rng.normal(size=n), dtype=torch.float32)
    return new, prox, behave, advantages, torch.tensor(rng.random(n) < 0.7)


SEQUENCES = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 25, 5, 20]))


@pytest.mark.parametrize("seed", range(3))
def test_gspo_oracle(seed: int) -> None:
    """The value by token; and where a sequence has one advantage, the gradient of its ratio as a whole."""
    new, prox, _, advantages, mask = drawn(seed)
    new.requires_grad_(True)
    found = F.gspo_gain(new, prox, advantages, mask, SEQUENCES, clip_low=0.3, clip_high=0.4)
    new_, prox_, mask_ = (x.detach().numpy() for x in (new, prox, mask))
    for s in range(4):
        mine = (SEQUENCES.numpy() == s) & mask_
        ratio = np.exp((new_ - prox_)[mine].mean())
        a = advantages.numpy()[mine]
        expected = np.minimum(ratio * a, np.clip(ratio, 0.7, 1.4) * a)
        np.testing.assert_allclose(found.gain.detach().numpy()[mine], expected, rtol=1e-5)

    level = torch.tensor([1.0, -2.0, 0.5, 3.0])[SEQUENCES]
    other = new.detach().clone().requires_grad_(True)
    ours = F.gspo_gain(new, prox, level, mask, SEQUENCES, clip_low=0.3, clip_high=0.4).gain
    length = F.segment_sum(mask.float(), SEQUENCES)
    torch.autograd.backward((ours / length).sum())
    theirs = torch.zeros(())
    for s in range(4):
        mine_ = (s == SEQUENCES) & mask
        ratio_ = (other - prox)[mine_].mean().exp()
        a_ = level[s == SEQUENCES][0]
        theirs = theirs + torch.minimum(ratio_ * a_, ratio_.clamp(0.7, 1.4) * a_)
    torch.autograd.backward(theirs)
    torch.testing.assert_close(new.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_cispo_oracle() -> None:
    new, prox, _, advantages, mask = drawn(3)
    new.requires_grad_(True)
    found = F.cispo_gain(new, prox, advantages, mask, clip_low=1.0, clip_high=0.5)
    torch.autograd.backward(found.gain.sum())
    weight = np.clip(np.exp((new.detach() - prox).numpy()), 0, 1.5)
    expected = np.where(mask.numpy(), weight * advantages.numpy(), 0)
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(found.gain.detach().numpy(), expected * new.detach().numpy(), rtol=1e-5)
    assert (found.clipped.numpy() == (mask.numpy() & (weight == 1.5))).all()


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_behaviour_weight_oracle(
    correction: Literal["truncate", "mask"], level: Literal["token", "sequence", "geometric"]
) -> None:
    _, prox, behave, _, mask = drawn(4)
    found, changed = F.behaviour_weight(
        prox, behave, mask, correction=correction, cap=1.5, floor=0.8, level=level, sequences=SEQUENCES
    )
    difference, on = (prox - behave).double().numpy(), mask.numpy()
    raw = np.zeros(len(on))
    for s in range(4):
        mine = (SEQUENCES.numpy() == s) & on
        parts = difference[mine]
        raw[mine] = {"token": parts, "sequence": parts.sum(), "geometric": parts.mean()}[level]
    raw = np.exp(np.clip(raw, -20, 20))
    expected = np.minimum(raw, 1.5) if correction == "truncate" else np.where((raw > 1.5) | (raw < 0.8), 0, raw)
    np.testing.assert_allclose(found.numpy()[on], expected[on], rtol=1e-4)
    assert (changed.numpy() == (on & (expected != raw))).all()


def test_weights_by_sequence_need_the_sequences() -> None:
    _, prox, behave, _, mask = drawn(4)
    with pytest.raises(ValueError, match="sequence"):
        F.behaviour_weight(prox, behave, mask, correction="truncate", cap=2.0, level="sequence")


@pytest.mark.parametrize("clip", [None, 0.1])
def test_value_loss_oracle(clip: float | None) -> None:
    values, old, returns, _, mask = drawn(5)
    v, o, r = (x.double().numpy() for x in (values, old, returns))
    expected = (v - r) ** 2
    if clip is not None:
        expected = np.maximum(expected, (o + np.clip(v - o, -clip, clip) - r) ** 2)
    found = F.value_loss(values, old, returns, mask, clip)
    np.testing.assert_allclose(found.numpy(), np.where(mask.numpy(), expected / 2, 0), rtol=1e-4, atol=1e-6)


# ---- advantages --------------------------------------------------------------------------------------------------


def tokens(turns: list[int], credit: list[float], values: list[float], penalty: list[float]) -> EpisodeTokens:
    return EpisodeTokens(np.array(turns), np.array(credit), np.array(values), np.array(penalty))


def test_critic_over_tokens() -> None:
    """Rewards of turns stand on their last tokens; turn 1 has no token, and its reward is turn 0's doing."""
    chosen = load("ppo", discount=0.9, gae_lambda=0.5)
    values, penalty = [0.1, 0.2, 0.3, 0.4], [0.01, 0.02, 0.03, 0.04]
    earned = {0: 1.0, 1: 0.25, 2: 2.0}
    credit = F.returns_to_go(earned)
    found = chosen.advantages(tokens([0, 0, 2, 2], [credit[t] for t in (0, 0, 2, 2)], values, penalty))
    rewards = [-0.01, 1.25 - 0.02, -0.03, 2.0 - 0.04]
    expected = F.gae(rewards, values, 0.9, 0.5)
    np.testing.assert_allclose(found.advantages, expected)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns, np.array(expected) + values)


def test_critic_over_turns() -> None:
    chosen = load("ppo", gae_steps="turn", discount=0.9, gae_lambda=0.5)
    found = chosen.advantages(
        tokens([0, 0, 0, 1, 1], [3.0, 3.0, 3.0, 2.0, 2.0], [0.1, 9, 9, 0.4, 9], [0.1, 0.1, 0.1, 0.2, 0.2])
    )
    expected = np.array(F.gae([1.0 - 0.3, 2.0 - 0.4], [0.1, 0.4], 0.9, 0.5))
    np.testing.assert_allclose(found.advantages, np.repeat(expected, [3, 2]))
    assert found.returns is not None
    np.testing.assert_allclose(found.returns, np.repeat(expected + np.array([0.1, 0.4]), [3, 2]))


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
@pytest.mark.parametrize("whiten", ["off", "group", "batch"])
def test_an_episode_in_pieces_has_the_advantages_of_the_whole(name: str, whiten: str) -> None:
    """Cut into a pass a trajectory or all in one, and packed in another order."""
    rng = np.random.default_rng(0)
    groups = [random_group(i, rng, samples=3, split=True) for i in range(2)]
    chosen = load(name, kl_coef=0.2, whiten=whiten)
    by_token: list[dict[tuple[int, ...], float]] = []
    for budget in (1 << 20, 2):
        batches = ready(chosen, tables(), made(chosen, groups, budget=budget))
        assert (len(batches) > 10) == (budget == 2)
        found: dict[tuple[int, ...], float] = {}
        for b in batches:
            keys = torch.stack([b.episodes, b.trajectories.long(), b.positions], 1)[b.mask].tolist()
            found |= {tuple(k): a for k, a in zip(keys, b.advantages[b.mask].tolist(), strict=True)}
            assert (b.advantages[~b.mask] == 0).all()
        by_token.append(found)
    assert by_token[0] == pytest.approx(by_token[1], abs=1e-5)


def test_whitening() -> None:
    rng = np.random.default_rng(1)
    groups = [random_group(i, rng, samples=3) for i in range(3)]
    for whiten in ("group", "batch"):
        chosen = load("reinforce_pp", whiten=whiten, kl_coef=0.2)
        batches = ready(chosen, tables(), made(chosen, groups, budget=90))
        advantages = torch.cat([b.advantages[b.mask] for b in batches])
        places = torch.cat([b.groups[b.mask] for b in batches])
        for part in [places == g for g in range(3)] if whiten == "group" else [places >= 0]:
            assert float(advantages[part].mean()) == pytest.approx(0, abs=1e-5)
            assert float(advantages[part].std(unbiased=False)) == pytest.approx(1, abs=1e-3)


def test_penalty_in_the_reward_is_paid_by_the_tokens_before_it(numerics: Case) -> None:
    """Untrained tokens pay nothing and add nothing (F25)."""
    group = Group(0, 0, 0, "test", (episode([draw("cscs")], [(0, 0, 2, 0.0), (1, 0, 4, 1.0)]),))
    given, expected = numerics["F25"]["input"], numerics["F25"]["expected"]
    chosen = load("reinforce_pp", kl_coef=given["beta"], whiten="off")
    logprobs, reference = torch.zeros(300), torch.zeros(300)
    logprobs[[11, 12, 13]] = torch.tensor(given["kl"])
    batch = ready(chosen, Predicted(logprobs, reference), made(chosen, [group]))[0]
    assert batch.advantages.tolist() == pytest.approx(
        [0, given["reward"] - expected["total_kl_penalty"], 0, given["reward"] - given["kl"][2]]
    )


def test_episodes_that_were_cut_short_can_be_left_out(numerics: Case) -> None:
    """Their tokens are in no denominator (F14), their rewards stay in the baseline."""
    case = numerics["F14"]
    n, cut = case["input"]["n_tokens"], case["input"]["n_truncated"]
    kept, dropped = "c" + "s" * (n - cut), "c" + "s" * cut
    group = Group(
        0,
        0,
        0,
        "test",
        (
            episode([draw(kept)], [(0, 0, len(kept), 1.0)]),
            episode([draw(dropped)], [(0, 0, len(dropped), 0.0)], sample=1, stop=Stop.MAX_TOKENS),
        ),
    )
    chosen = load("dr_grpo", aggregation="token_mean", fixed_length=None, leave_out_truncated=True)
    batches = ready(chosen, tables(), made(chosen, [group]))
    assert sum(int(b.mask.sum()) for b in batches) == n - cut
    total = sum(float((b.weights * case["input"]["token_loss"]).sum()) for b in batches)
    assert total == pytest.approx(case["expected"]["loss"])
    assert {a for b in batches for a in b.advantages[b.mask].tolist()} == {0.5}


# ---- losses ------------------------------------------------------------------------------------------------------


def one_batch(chosen: Algorithm) -> Batch:
    rng = np.random.default_rng(2)
    return ready(chosen, tables(), made(chosen, [random_group(i, rng) for i in range(2)]))[0]


def says(batch: Batch, *, seed: int = 9) -> Output:
    rng = torch.Generator().manual_seed(seed)
    raw = [torch.where(batch.mask, -3 * torch.rand(len(batch.mask), generator=rng), 0.0) for _ in range(3)]
    return Output(*(x.requires_grad_(True) for x in raw))


def test_kl_in_the_loss_is_added_and_in_the_reward_is_not() -> None:
    plain, added = load(), load(kl_coef=0.3, kl_estimator="k2")
    batch, out = one_batch(added), says(one_batch(added))
    assert batch.reference is not None
    expected = 0.3 * (batch.weights * F.kl(out.logprobs, batch.reference, batch.mask, "k2")).sum()
    with_kl, metrics = added.loss(batch, out)
    without, _ = plain.loss(batch, out)
    torch.testing.assert_close(with_kl - without, expected)
    assert {"kl/reference", "kl/penalty"} <= set(metrics)
    inside = load(kl_coef=0.3, kl_in="reward")
    torch.testing.assert_close(inside.loss(batch, out)[0], without)


def test_equal_rewards_leave_the_kl_term_alone(numerics: Case) -> None:
    """It applies by default; where a run is to have none of it, `rollout.filter_equal` keeps such groups out (F27)."""
    rewards = numerics["F27"]["input"]["rewards"]
    episodes = [episode([draw("cs")], [(0, 0, 2, float(r))], sample=i) for i, r in enumerate(rewards)]
    chosen = load(kl_coef=numerics["F27"]["input"]["beta"], kl_estimator="k2")
    batch = ready(chosen, tables(), made(chosen, [Group(0, 0, 0, "test", tuple(episodes))]))[0]
    out = says(batch)
    loss, _ = chosen.loss(batch, out)
    (gradient,) = torch.autograd.grad(loss, out.logprobs)
    assert batch.reference is not None
    pull = chosen.options.kl_coef * batch.weights * F.log_ratio(out.logprobs, batch.reference, batch.mask)
    torch.testing.assert_close(gradient, pull.detach())


def test_value_loss_is_added() -> None:
    chosen = load("ppo", value_coef=0.7, value_clip=None)
    batch = one_batch(chosen)
    out = says(batch)
    assert batch.returns is not None
    assert out.values is not None
    loss, metrics = chosen.loss(batch, out)
    without = Algorithm.loss(chosen, batch, out)[0]
    expected = 0.7 * (batch.weights * (out.values - batch.returns).square() / 2).sum()
    torch.testing.assert_close(loss - without, expected)
    assert "value/error/square" in metrics


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo", "icepop"])
def test_the_sum_over_any_cut_is_the_loss_of_the_whole(name: str) -> None:
    chosen = load(name, kl_coef=0.1)
    rng = np.random.default_rng(3)
    groups = [random_group(i, rng) for i in range(2)]
    losses = []
    for budget in (1 << 20, 2):
        batches = ready(chosen, tables(), made(chosen, groups, budget=budget))
        said = torch.linspace(-4, -0.1, 300)
        outs = [
            Output(torch.where(b.mask, said[b.tokens], 0.0), torch.zeros(len(b.mask)), said[b.tokens] * b.mask)
            for b in batches
        ]
        losses.append(sum(chosen.loss(b, o)[0].item() for b, o in zip(batches, outs, strict=True)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != 0


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo", "icepop"])
def test_a_batch_without_a_token_has_the_same_metrics_and_no_gradient(name: str) -> None:
    """As a rank's dummy pass has, or the ranks could not add theirs up."""
    chosen = load(name, kl_coef=0.1, entropy_bonus=0.01)
    full, dummy = one_batch(chosen), pack([], {}, {}, version=0)
    dummy = dummy.with_reference(torch.zeros(2)).with_proximal(torch.zeros(2), torch.zeros(2))
    dummy = dummy.with_advantages(torch.zeros(2), torch.zeros(2))
    out = says(dummy)
    loss, metrics = chosen.loss(dummy, out)
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert out.logprobs.grad is not None
    assert out.logprobs.grad.tolist() == [0, 0]
    assert set(metrics) == set(chosen.loss(full, says(full))[1])
    assert not any(value.requires_grad for metric in metrics.values() for value in metric)


def test_staleness_is_told_apart_by_where_it_arose() -> None:
    """Two tokens of version 1, one of version 3, trained at version 5: two versions in the queue, two in flight."""
    group = Group(0, 0, 0, "test", (episode([draw("c1ss3s")], [(0, 0, 4, 1.0)]),))
    batch = pack([Item(0, 0, 0, 4)], {0: group}, {0: [{0: 1.0}]}, version=5)
    assert batch.staleness.tolist() == [0, 4, 4, 2]
    assert batch.queued.tolist() == [0, 2, 2, 2]
    _, metrics = load().loss(batch, says(batch))

    def value(name: str) -> float:
        found = metrics[name]
        assert isinstance(found, Mean)
        return float(found.total / found.weight)

    assert value("staleness/queue_2-3") == 1
    assert value("staleness/flight_2-3") == pytest.approx(2 / 3)
    assert value("staleness/flight_0") == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["grpo", "cispo"])
def test_a_trajectory_of_several_versions_trains_as_its_parts_would(name: str) -> None:
    """Each part with the other's tokens as context: the losses and gradients add up to the whole's."""
    chosen = load(name, behaviour_cap=1.5)
    said = torch.linspace(-2, -0.5, 7, requires_grad=True)
    found = []
    for picture in ("c1ss3sss", "c1ss3uuu", "c1uu3sss"):
        group = Group(0, 0, 0, "test", (episode([draw(picture)], [(0, 0, 6, 1.0)]),))
        batch = pack([Item(0, 0, 0, 6)], {0: group}, {0: [{0: 0.7}]}, version=4)
        proximal = torch.where(batch.mask, batch.behaviour * 0.5, 0.0)
        batch = batch.with_advantages(batch.credit).with_weights(batch.mask / 5).with_proximal(proximal)
        out = Output(torch.where(batch.mask, said[:6], 0.0), torch.zeros(6))
        loss, _ = chosen.loss(batch, out)
        found.append(torch.cat([loss[None], *torch.autograd.grad(loss, said)]))
    whole, first, second = found
    assert bool((whole[2:7] != 0).any())
    torch.testing.assert_close(whole, first + second)


def test_old_weights_are_corrected_for(numerics: Case) -> None:
    """The decoupled loss is w times plain PPO on every token; 'off' is plain PPO."""
    batch = one_batch(load())
    batch = dataclasses.replace(batch, proximal=torch.where(batch.mask, batch.behaviour + 0.5, 0.0))
    out = says(batch)
    on, _ = load().loss(batch, out)
    off, _ = load(behaviour="off").loss(batch, out)
    torch.testing.assert_close(on, off * float(np.exp(0.5)))
