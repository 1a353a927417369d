"""Rotary positions are the family's own, with their gradients; families of another kind keep theirs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.cohere import CohereConfig
from transformers.models.llama import LlamaConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.nemotron import NemotronConfig
from transformers.models.phi import PhiConfig
from transformers.models.qwen3 import Qwen3Config

from agentrl.train.rotary import replace_rotary, rotate

SIZE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


def test_forward_and_gradients() -> None:
    torch.manual_seed(0)
    q, k, cos, sin = (torch.randn(s, dtype=torch.float64) for s in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8)))
    # As attention has them: heads and tokens exchanged in memory.
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k))
    factors = [torch.randn_like(x) for x in (q, k)]
    found = []
    for function in (rotate, llama.apply_rotary_pos_emb):
        out = function(q, k, cos, sin)
        loss = sum((x * f).sum() for x, f in zip(out, factors, strict=True))
        found.append([*out, *torch.autograd.grad(loss, (q, k))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("config", "replaced"),
    [
        (LlamaConfig(**SIZE), 2),
        (Qwen3Config(**SIZE, head_dim=8), 2),
        (CohereConfig(**SIZE), 0),  # interleaved pairs
        (NemotronConfig(**SIZE, partial_rotary_factor=0.5), 0),  # cuts its part out itself
        (PhiConfig(**SIZE), 2),  # the part of the width that is turned is cut out before
    ],
    ids=["llama", "qwen3", "cohere", "nemotron", "phi"],
)
def test_models_compute_as_before(config: LlamaConfig, replaced: int) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(12)[None]
    before = model(tokens).logits
    kept = llama.apply_rotary_pos_emb
    assert replace_rotary(model) == replaced
    torch.testing.assert_close(model(tokens).logits, before)
    assert llama.apply_rotary_pos_emb is kept
