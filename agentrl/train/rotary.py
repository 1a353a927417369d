"""Rotary positions in three passes over memory where transformers takes five, and in the backward pass nine.

    (x₁, x₂) → (x₁ cos₁ - x₂ sin₁, x₂ cos₂ + x₁ sin₂)   for the halves of a head's width (Su et al., arXiv 2104.09864)

It stands in for a family's own function where that computes the same; others (interleaved pairs, a part of the width)
keep theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"


class _Rotate(torch.autograd.Function):
    """x `[B, heads, T, D]`, cos and sin `[B, 1, T, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out, half = x * cos, x.shape[-1] // 2
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        found, half = grad * cos, grad.shape[-1] // 2
        found[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        found[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return found, None, None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb`: q and k `[B, heads, T, D]`, cos and sin `[B, T, D]`."""
    wide = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(_Rotate.apply(x, *wide) for x in (q, k))  # type: ignore[no-untyped-call]


def replace_rotary(model: nn.Module) -> int:
    """Let the model's attention call `rotate`; returns in how many modules.

    Each gets a forward of its own, with the same code: the family's module, which others use, is left as it is.
    """
    found = 0
    for module in model.modules():
        # Below wrappers that translate what callers of older versions give.
        forward = inspect.unwrap(cast(Any, type(module).forward))
        if not isinstance(forward, FunctionType):
            continue
        if NAME not in forward.__code__.co_names or not _same(forward.__globals__.get(NAME)):
            continue
        names = {**forward.__globals__, NAME: rotate}
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        cast(Any, module).forward = MethodType(own, module)
        found += 1
    return found


def _same(theirs: Callable[..., Any] | None) -> bool:
    """Whether it takes and computes what `rotate` does, on numbers without any pattern."""
    if theirs is None or list(inspect.signature(theirs).parameters) != list(inspect.signature(rotate).parameters):
        return False
    # Cosines of a part of the width are an error to `rotate`, and must be one to theirs.
    return all(_outcome(theirs, width) == _outcome(rotate, width) for width in (8, 4))


def _outcome(function: Callable[..., Any], width: int) -> list[Any] | None:
    """What it makes of heads of width 8, rounded; None where it refuses."""
    draw = torch.Generator().manual_seed(0)
    shapes = (1, 3, 5, 8), (1, 2, 5, 8), (1, 5, width), (1, 5, width)
    try:
        found = function(*(torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes))
    except RuntimeError:  # torch's, of shapes that do not fit
        return None
    return [x.mul(1e9).round().tolist() for x in found]
