"""Training state on disk: one safetensors file a rank, readable by any other number of ranks.

ZeRO-3 cuts each parameter's flat values into equal parts, one a rank, the last padded. A file holds its rank's parts,
so a span of the whole is found by arithmetic, whatever number of ranks asks.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.train.checkpoint import state_file


class Reader:
    """Reads spans of the values that `world` ranks saved in `folder`."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder, self._world = folder, world
        self._stack = ExitStack()
        self._files: list[Any] = []

    def __enter__(self) -> Reader:
        self._files = [
            self._stack.enter_context(safe_open(self._folder / state_file(rank, self._world), framework="pt"))
            for rank in range(self._world)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def whole(self, key: str, rank: int) -> Tensor:
        """The tensor as `rank` saved it."""
        found: Tensor = self._files[rank].get_tensor(key)
        return found

    def span(self, key: str, start: int, length: int, size: int) -> Tensor:
        """Values `[start, start+length)` of a flat parameter of `size` values; zeros past its end (padding)."""
        out = torch.zeros(length)
        at, end = start, min(start + length, size)
        while at < end:
            part = self._files[0].get_slice(key).get_shape()[0]
            rank, offset = divmod(at, part)
            n = min(end - at, part - offset)
            out[at - start : at - start + n] = self._files[rank].get_slice(key)[offset : offset + n]
            at += n
        return out
