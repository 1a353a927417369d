"""The oracle: teacher-forced log-probs by transformers' own forward pass in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentrl.engine.types import Completion
from agentrl.types import Float32Array, Version


@cache
def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(folder: Path, tokens: Sequence[int], temperature: float = 1.0) -> Float32Array:
    """`[n, V]`: row i is the distribution after the first i+1 tokens."""
    with torch.no_grad():
        logits = _model(folder)(torch.tensor([list(tokens)])).logits[0] / temperature
    return np.asarray(logits.log_softmax(-1).numpy(), np.float32)


def worst_error(
    prompt: Sequence[int], done: Completion, folder_of: Mapping[Version, Path], temperature: float = 1.0
) -> float:
    """The largest difference of any token's log-prob from the model that its span names."""
    whole = [*prompt, *done.tokens.tolist()]
    worst = 0.0
    for span in done.spans:
        table = logprobs(folder_of[span.version], whole, temperature)
        for i in range(span.start, span.end):
            worst = max(worst, abs(float(table[len(prompt) + i - 1, whole[len(prompt) + i]]) - float(done.logprobs[i])))
    return worst
