"""The arithmetic of policy optimisation: pure functions of tensors and numbers, no state, no collectives.

Shapes: T tokens of a packed batch, N rows, H hidden size, V vocabulary. Log-probabilities are float32. Three policies
appear: the *behaviour* policy that sampled a token (any version), the *proximal* policy (the weights when the step
began) and the *current* policy θ (the weights being trained).

Differences of log-probs are masked before they are exponentiated, and clamped to ±20, so that nothing can overflow and
0 · inf cannot appear, whatever stands in a masked place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    u = π_θ/π_prox carries the gradient; w = π_prox/π_behave is a constant, cut at `cap` ("truncate") or zero outside
    [1/cap, cap] ("mask", IcePop). With `dual_clip` = c a negative advantage costs at most c·|A| (Ye et al. 2020).
    """
    ratio = log_ratio(logprobs, proximal, mask).exp()
    limited = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, cut = ratio * advantages, limited * advantages
    gain = torch.minimum(plain, cut)
    clipped = (cut < plain) & mask
    if dual_clip is not None:
        floor = dual_clip * advantages
        clipped = clipped | ((advantages < 0) & (gain < floor) & mask)
        gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
    weight, capped = behaviour_weight(proximal, behaviour, mask, correction=correction, cap=cap)
    return Surrogate(torch.where(mask, -weight * gain, 0.0), ratio, weight, clipped, capped)


def behaviour_weight(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, *, correction: Literal["truncate", "mask", "off"], cap: float
) -> tuple[Tensor, Tensor]:
    """w `[T]` without gradient, and where the cap or the mask changed it."""
    raw = log_ratio(proximal.detach(), behaviour, mask).exp()
    if correction == "off":
        return torch.ones_like(raw), torch.zeros_like(mask)
    if correction == "truncate":
        return raw.clamp(max=cap), (raw > cap) & mask
    outside = (raw > cap) | (raw < 1 / cap)
    return torch.where(outside, 0.0, raw), outside & mask


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
    """The mean over the mask; 0, still in the graph, where the mask is empty."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def gather_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens`: `[N, V]`, `[N]` → `[N]` float32."""
    scaled = logits.float() / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    return scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(1)


# ---- credit: plain numbers of one group --------------------------------------------------------------------------


def group_advantages(
    returns: Sequence[float | None], baseline: Literal["group_std", "group_mean", "leave_one_out", "none"]
) -> list[float]:
    """One advantage an episode from the returns of a group; None (no verdict) enters nothing and gets 0.

    group_std: (R - mean) / (std + 1e-6), Bessel-corrected (GRPO, Shao et al. 2024); group_mean: R - mean (Dr.GRPO, Liu
    et al. 2025); leave_one_out: R - mean of the others (RLOO, Ahmadian et al. 2024). A group of one, or of equal
    returns, has advantage 0 under each of these; "none" returns R.
    """
    known = [r for r in returns if r is not None]
    if baseline == "none":
        return [0.0 if r is None else r for r in returns]
    n = len(known)
    if n < 2 or max(known) == min(known):
        return [0.0 for _ in returns]
    mean = math.fsum(known) / n
    if baseline == "leave_one_out":
        return [0.0 if r is None else (r - mean) * n / (n - 1) for r in returns]
    scale = 1.0
    if baseline == "group_std":
        scale = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (n - 1)) + 1e-6
    return [0.0 if r is None else (r - mean) / scale for r in returns]


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
