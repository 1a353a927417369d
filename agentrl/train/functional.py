"""The arithmetic of policy optimisation: pure functions of tensors and numbers, no state, no collectives.

Shapes: T tokens of a packed batch, N rows, H hidden size, V vocabulary. Log-probabilities are float32. Three policies
appear: the *behaviour* policy that sampled a token (any version), the *proximal* policy (the weights when the step
began) and the *current* policy θ (the weights being trained).

Differences of log-probs are masked before they are exponentiated, and clamped to ±20, so that nothing can overflow and
0 · inf cannot appear, whatever stands in a masked place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """log(π_new/π_old) `[T]`, float32, 0 off the mask, within ±20."""
    zero = torch.zeros((), dtype=torch.float32, device=new.device)
    # Masked on both sides of the subtraction: a sentinel (-inf, nan) must not reach it, nor its gradient.
    return (torch.where(mask, new.float(), zero) - torch.where(mask, old.float(), zero)).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


class Gain(NamedTuple):
    """Per token `[T]`: what the surrogate objective gains, u = π_θ/π_prox, and where clipping bit."""

    gain: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo_gain(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Gain:
    """min(u·A, clip(u, 1-ε_low, 1+ε_high)·A) (Schulman et al. 2017); u carries the gradient.

    With `dual_clip` = c a negative advantage costs at most c·|A| (Ye et al. 2020).
    """
    ratio = log_ratio(logprobs, proximal, mask).exp()
    return _clipped_gain(ratio, advantages, mask, clip_low, clip_high, dual_clip)


def _clipped_gain(
    ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Gain:
    plain, cut = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain = torch.minimum(plain, cut)
    clipped = (cut < plain) & mask
    if dual_clip is not None:
        floor = dual_clip * advantages
        clipped = clipped | ((advantages < 0) & (gain < floor) & mask)
        gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
    return Gain(torch.where(mask, gain, 0.0), ratio, clipped)


def gspo_gain(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Gain:
    """PPO's gain with the sequence's ratio s = exp(mean over its tokens of log u) (Zheng et al. 2025, GSPO-token).

    s is a constant to each token's gradient, times u/sg(u): equal to GSPO where all tokens have one advantage.
    """
    difference = log_ratio(logprobs, proximal, mask)
    length = segment_sum(mask.float(), sequences).clamp(min=1)
    sequence = (segment_sum(difference, sequences) / length).detach()
    ratio = torch.where(mask, (sequence + difference - difference.detach()).exp(), 1.0)
    return _clipped_gain(ratio, advantages, mask, clip_low, clip_high, None)


def cispo_gain(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Gain:
    """sg(clip(u, 1-ε_low, 1+ε_high))·A·log π_θ (MiniMax-M1 2025): clipping bounds a weight, and no token's
    gradient vanishes."""
    ratio = log_ratio(logprobs, proximal, mask).exp().detach()
    limited = ratio.clamp(1 - clip_low, 1 + clip_high)
    zero = torch.zeros((), device=logprobs.device)
    gain = limited * advantages * torch.where(mask, logprobs.float(), zero)
    return Gain(torch.where(mask, gain, 0.0), ratio, (limited != ratio) & mask)


def behaviour_weight(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    correction: Literal["truncate", "mask", "off"],
    cap: float,
    floor: float | None = None,
    level: Literal["token", "sequence", "geometric"] = "token",
    sequences: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """w = π_prox/π_behave `[T]` without gradient, and where the cap or the mask changed it.

    "truncate" cuts it at `cap` (truncated importance sampling), "mask" makes it 0 outside [floor, cap], with 1/cap as
    the floor where none is given (IcePop), "off" makes it 1. Over a sequence it is the product of its tokens'
    ("sequence") or their geometric mean; these two need `sequences` `[T]`, each token's sequence.
    """
    difference = log_ratio(proximal.detach(), behaviour, mask)
    if correction == "off":
        return torch.ones_like(difference), torch.zeros_like(mask)
    if level != "token":
        if sequences is None:
            raise ValueError(f"a behaviour weight by {level} needs each token's sequence, got None")
        difference = segment_sum(difference, sequences)
        if level == "geometric":
            difference = difference / segment_sum(mask.float(), sequences).clamp(min=1)
    raw = torch.where(mask, difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0).exp()
    if correction == "truncate":
        return raw.clamp(max=cap), (raw > cap) & mask
    outside = (raw > cap) | (raw < (1 / cap if floor is None else floor))
    return torch.where(outside, 0.0, raw), outside & mask


class Surrogate(NamedTuple):
    """Per token `[T]`: the loss, u = π_θ/π_prox, w as applied, and where clipping or the cap bit."""

    loss: Tensor
    ratio: Tensor
    weight: Tensor
    clipped: Tensor
    capped: Tensor


def decoupled_ppo(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    correction: Literal["truncate", "mask", "off"] = "truncate",
    cap: float = 5.0,
) -> Surrogate:
    """-w · min(u·A, clip(u, 1-ε_low, 1+ε_high)·A), 0 off the mask (Hilton et al. 2021; AReaL 2025, eq. 5).

    u = π_θ/π_prox carries the gradient; w = π_prox/π_behave is a constant, cut at `cap` or masked.
    """
    found = ppo_gain(logprobs, proximal, advantages, mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weight, capped = behaviour_weight(proximal, behaviour, mask, correction=correction, cap=cap)
    return Surrogate(-weight * found.gain, found.ratio, weight, found.clipped, capped)


def segment_sum(values: Tensor, segments: Tensor) -> Tensor:
    """The sum over each segment, at every one of its places: `[T]`, ids `[T]` from 0 → `[T]`."""
    count = int(segments[-1]) + 1 if len(segments) else 0
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, segments, values)[segments]


def kl(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(π‖π_ref) per sampled token `[T]`, 0 off the mask (Schulman 2020).

    k1 is unbiased and may be negative, k2 is biased with low variance, k3 is unbiased and never negative.
    """
    difference = log_ratio(logprobs, reference, mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the mask, in float32 at least; 0, still in the graph, where the mask is empty."""
    total = torch.where(mask, values, 0.0).sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return total / mask.sum().clamp(min=1)


def gather_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens`: `[N, V]`, `[N]` → `[N]` float32."""
    scaled = logits.float() / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    return scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(1)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """½·max((V - R)², (V_old + clip(V - V_old, ±ε) - R)²) `[T]`, 0 off the mask; without the second where ε is None."""
    # Masked before: what stands elsewhere must not reach a gradient.
    values, old, returns = (torch.where(mask, x, 0.0) for x in (values, old, returns))
    error = (values - returns).square()
    if clip is not None:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return torch.where(mask, error / 2, 0.0)


# ---- credit: plain numbers of one group --------------------------------------------------------------------------


def group_advantages(
    returns: Sequence[float | None], baseline: Literal["group_std", "group_mean", "leave_one_out", "none"]
) -> list[float]:
    """One advantage an episode from the returns of a group; None (no verdict) enters nothing and gets 0.

    ValueError where another return is not finite: it would poison the whole group.

    group_std: (R - mean) / (std + 1e-6), Bessel-corrected (GRPO, Shao et al. 2024); group_mean: R - mean (Dr.GRPO, Liu
    et al. 2025); leave_one_out: R - mean of the others (RLOO, Ahmadian et al. 2024). A group of one, or of equal
    returns, has advantage 0 under each of these; "none" returns R.
    """
    known = _finite(r for r in returns if r is not None)
    if baseline == "none":
        return [0.0 if r is None else r for r in returns]
    n = len(known)
    if n < 2 or max(known) == min(known):
        return [0.0 for _ in returns]
    mean = _mean(known)
    if baseline == "leave_one_out":
        return [0.0 if r is None else (r - mean) * n / (n - 1) for r in returns]
    scale = 1.0
    if baseline == "group_std":
        scale = _root_mean_square([r - mean for r in known], n - 1) + 1e-6
    return [0.0 if r is None else (r - mean) / scale for r in returns]


def turn_advantages(
    returns: Sequence[Mapping[int, float] | None], baseline: Literal["group_std", "group_mean", "leave_one_out", "none"]
) -> list[dict[int, float]]:
    """One advantage an episode and turn from the returns of each turn onwards; None (no verdict) gets none.

    A turn is compared with the same turn of the group's other episodes, and an episode that had ended by then counts
    there with its return of 0. So the baseline does not depend on how often the episode itself still acts, which would
    bias it; and all turns of a group share one scale: the root of the mean variance over turns. ValueError as above.
    """
    known = [r for r in returns if r is not None]
    _finite(value for r in known for value in r.values())
    if baseline == "none":
        return [{} if r is None else dict(r) for r in returns]
    n, places = len(known), sorted({turn for r in known for turn in r})
    if n < 2:
        return [{} if r is None else dict.fromkeys(r, 0.0) for r in returns]
    means = {turn: _mean([r.get(turn, 0.0) for r in known]) for turn in places}
    scale = (n - 1) / n if baseline == "leave_one_out" else 1.0
    if baseline == "group_std":
        deviations = [r.get(turn, 0.0) - means[turn] for turn in places for r in known]
        scale = _root_mean_square(deviations, (n - 1) * max(len(places), 1)) + 1e-6
    return [{} if r is None else {turn: (r[turn] - means[turn]) / scale for turn in r} for r in returns]


def _finite(returns: Iterable[float]) -> list[float]:
    found = list(returns)
    if odd := [r for r in found if not math.isfinite(r)]:
        raise ValueError(f"return {odd[0]!r} is not a finite number, and None is the only way to say 'no verdict'")
    return found


def _mean(values: Sequence[float]) -> float:
    """Of equal values exactly their value, of large ones no overflow."""
    if max(values) == min(values):
        return values[0]
    shrink = 0.5 ** len(values).bit_length()  # a power of two: nothing is rounded
    return math.fsum(v * shrink for v in values) / (len(values) * shrink)


def _root_mean_square(values: Sequence[float], count: int) -> float:
    # hypot scales by the largest: a reward of 1e200 must not overflow when squared.
    return math.hypot(*values) / math.sqrt(count)


def returns_to_go(rewards: Mapping[int, float], discount: float = 1.0) -> dict[int, float]:
    """Of each turn: its reward and the later ones', each step later times `discount`."""
    found: dict[int, float] = {}
    ahead = 0.0
    for turn in sorted(rewards, reverse=True):
        found[turn] = ahead = rewards[turn] + discount * ahead
    return found


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float) -> float:
    """0 up to `limit - buffer` tokens, then linearly to -penalty at `limit` and beyond (Yu et al. 2025)."""
    if length > limit or buffer == 0:
        return -penalty if length > limit else 0.0
    return min((limit - buffer - length) / buffer, 0.0) * penalty


def gae(rewards: Sequence[float], values: Sequence[float], discount: float, trace: float) -> list[float]:
    """Generalised advantages (Schulman et al. 2016, eq. 16): A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} - V_t.

    The state after the last step has value 0, however the episode ended.
    """
    found = [0.0] * len(rewards)
    ahead = following = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + discount * following - values[t]
        found[t] = ahead = delta + discount * trace * ahead
        following = values[t]
    return found


# ---- aggregation -------------------------------------------------------------------------------------------------


class Denominators(NamedTuple):
    """What a loss is divided by: trained tokens, and episodes with at least one; of the whole optimizer step,
    over all ranks and micro-batches, counted before any ratio-dependent masking."""

    tokens: float
    episodes: float


def token_weights(
    mask: Tensor,
    episode_tokens: Tensor,
    denominators: Denominators,
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"],
    fixed_length: int | None = None,
) -> Tensor:
    """The weight of each token in the step's loss `[T]`; a loss is `(weights * token_losses).sum()`.

    `episode_tokens` `[T]` is the number of trained tokens of the token's whole episode, wherever its parts are.
    token_mean: 1/tokens. sequence_mean: 1/(episode_tokens · episodes). fixed_length: 1/(fixed_length · episodes).
    """
    live = mask.float()
    if aggregation == "token_mean":
        return live / max(denominators.tokens, 1.0)
    episodes = max(denominators.episodes, 1.0)
    if aggregation == "sequence_mean":
        return live / episode_tokens.float().clamp(min=1.0) / episodes
    if fixed_length is None:
        raise ValueError("aggregation 'fixed_length' needs a length, got None")
    return live / (fixed_length * episodes)
