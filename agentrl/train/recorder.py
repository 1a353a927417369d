"""Keeps what the loss was given, for the traces that a person looks at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl.train.algorithm import Metrics, Output
from agentrl.train.batch import EPISODES, Batch
from agentrl.train.trace import Place, TokenTrace, encode_traces

Loss = Callable[[Batch, Output], tuple[Tensor, Metrics]]


class Recorder:
    """Watches the losses of one step. Of what is on the device only the log-probs are kept, until `encode`."""

    def __init__(self) -> None:
        self._seen: list[tuple[Batch, Tensor]] = []

    def watch(self, loss: Loss, batches: Sequence[Batch]) -> Loss:
        """The same loss, remembered; it will be asked for `batches`, in their order."""
        rest = iter(batches)

        def watched(batch: Batch, out: Output) -> tuple[Tensor, Metrics]:
            self._seen.append((next(rest), out.logprobs.detach()))
            return loss(batch, out)

        return watched

    def encode(self) -> bytes:
        """This rank's traces; what was seen is forgotten."""
        seen, self._seen = self._seen, []
        return encode_traces([trace for batch, logprobs in seen for trace in _traces(batch, logprobs)])


def _traces(batch: Batch, logprobs: Tensor) -> list[TokenTrace]:
    nan = torch.tensor(float("nan"))
    columns = [torch.where(batch.mask, x.float().cpu(), nan).numpy() for x in (batch.advantages, logprobs)]
    episodes, trajectories, groups = (x.numpy() for x in (batch.episodes, batch.trajectories, batch.groups))
    ends = batch.cu_seqlens.numpy()
    found = []
    for start, end in itertools.pairwise(ends):
        if episodes[start] < 0:
            continue  # a dummy
        place = Place(int(groups[start]), int(episodes[start] % EPISODES), int(trajectories[start]))
        advantages, probs = (np.array(column[start:end], np.float32) for column in columns)
        found.append(TokenTrace(place, advantages, probs))
    return found
