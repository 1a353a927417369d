"""Matrix products with weights that are packed once, at load, in the layout that the CPU's kernels read.

oneDNN's packed form saves a reorder of the weights at every product: most at 4 to 32 rows, the batch of a decode step.
Its operators are private to torch, so plain `F.linear` stands in wherever they are missing or refuse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CPU = torch.device("cpu")
_SMALLEST = 1 << 18
"""Smaller matrices stay in the cache, and a call costs more than a reorder."""
_ROWS = 32
"""The batch that the layout is chosen for."""


class Linear:
    """`x [n, in]` → `x Wᵀ + b [n, out]`."""

    __slots__ = ("_packed", "_plain", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        self.bias = bias
        self._packed = _packed(weight) if pack else None
        self._plain = weight if self._packed is None else None

    @property
    def weight(self) -> Tensor:
        """`[out, in]`, as it was given; unpacked at every call."""
        if self._packed is None:
            assert self._plain is not None, "one of the two forms is there"
            return self._plain
        dense: Tensor = self._packed.to_dense()
        return dense

    @property
    def is_packed(self) -> bool:
        """Whether the CPU's own layout is used."""
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self._plain is not None, "one of the two forms is there"
            return F.linear(x, self._plain, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def _packed(weight: Tensor) -> Tensor | None:
    if weight.device.type != "cpu" or weight.numel() < _SMALLEST:
        return None
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        # One product: what cannot be computed shows itself here and not in the middle of a generation.
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return packed


def computed_in(dtype: torch.dtype, device: torch.device = CPU) -> torch.dtype:
    """The precision to compute in for weights of `dtype`: float32 where the CPU has no instructions for bfloat16, which
    is then several times faster and no less exact."""
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return dtype
    try:
        supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return dtype
    return dtype if supported else torch.float32
