"""Packed weights compute what plain ones do, and give back what was packed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from agentrl.engine.embedded.linear import Linear, computed_in


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_and_plain_are_the_same(rows: int, dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(700, 500, generator=generator) / 20).to(dtype)
    bias = torch.randn(700, generator=generator).to(dtype) if with_bias else None
    x = torch.randn(rows, 500, generator=generator).to(dtype)
    packed, plain = Linear(weight, bias), Linear(weight, bias, pack=False)
    assert not plain.is_packed
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    with torch.inference_mode():
        assert (packed(x) - F.linear(x, weight, bias)).abs().max() < tolerance
        assert torch.equal(plain(x), F.linear(x, weight, bias))
    assert torch.equal(packed.weight, weight)
    assert torch.equal(plain.weight, weight)


def test_what_cannot_be_packed_is_computed_all_the_same() -> None:
    for weight in (torch.ones(3, 2), torch.ones(700, 500, dtype=torch.float64)):
        linear = Linear(weight)
        assert not linear.is_packed
        assert linear(torch.ones(4, weight.shape[1], dtype=weight.dtype)).shape == (4, len(weight))


def test_only_bfloat16_may_be_computed_in_another_precision() -> None:
    assert computed_in(torch.float32) is torch.float32
    assert computed_in(torch.bfloat16) in (torch.float32, torch.bfloat16)
