"""Weights straight into the engines: rank 0 and they are a process group, and it broadcasts bucket by bucket.

The conductor brings the group together, has the engines receive, and takes the folder instead wherever that fails
(agentrl/conductor/handover.py); this is the sender's end. A bucket is its tensors' bytes end to end, which SGLang calls
a flattened bucket. The other ranks only take part in the gathering.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from agentrl.train.deepspeed import GATHER_BYTES, Backend
from agentrl.train.export import Shape, buckets
from agentrl.train.feed import Feed
from agentrl.train.meeting import JOIN_SECONDS, SEND_SECONDS, join
from agentrl.types import Version

HOST = "127.0.0.1"


class _Group(NamedTuple):
    name: str
    backend: Any


class Broadcaster:
    """Sends the present weights to the engines, where they and the conductor are ready for it."""

    def __init__(self, backend: Backend, feed: Feed, bucket_bytes: int = GATHER_BYTES) -> None:
        self._backend, self._feed, self._bucket_bytes = backend, feed, bucket_bytes
        self._device = backend.device
        self._store: TCPStore | None = None
        self._group: _Group | None = None

    def send(self, step: int, version: Version, path: Path) -> bool:
        """Whether all of it left; the folder will be at `path` in any case. Collective."""
        backend, lead = self._backend, self._backend.rank == 0
        parts = buckets(backend.shapes, self._bucket_bytes)
        ready = lead and self._ready() and self._feed.receive(step, version, str(path), _described(parts))
        if not backend.broadcast(b"go" if ready else b""):
            return False
        weights = backend.weights(self._bucket_bytes)
        flat = torch.empty(max(sum(s.nbytes for s in part) for part in parts), dtype=torch.uint8, device=self._device)
        for part in parts:
            at = 0
            for shape in part:
                _, tensor = next(weights)
                if lead:
                    flat[at : at + shape.nbytes].copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
                at += shape.nbytes
            if lead and ready:
                ready = self._sent(flat[:at])
        for _ in weights:
            pass
        return bool(backend.broadcast(b"sent" if ready else b""))

    def close(self) -> None:
        """Leave the group: engines that wait for a bucket find out."""
        self._group = None  # the last reference: gloo closes its connections

    def _ready(self) -> bool:
        """Be in a group with all engines that serve."""
        if self._store is None:
            wait = datetime.timedelta(seconds=JOIN_SECONDS)
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=wait)
        held = self._group.name if self._group is not None else ""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        told = self._feed.weights_group(held, HOST, self._store.port, backend)
        if told is None:
            return False
        if told.name == held:
            return True
        self.close()
        try:
            self._group = _Group(told.name, join(self._store, told.name, 0, told.world, told.backend))
        except RuntimeError as error:  # an engine did not come: the folder it is
            print(f"agentrl.train: no weights group {told.name} with {told.world - 1} ranks of engines: {error}")
            return False
        return True

    def _sent(self, flat: Tensor) -> bool:
        """Whether the bytes reached everybody; otherwise the group is left."""
        assert self._group is not None
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            there = flat if isinstance(self._group.backend, _nccl()) else flat.cpu()
            self._group.backend.broadcast([there], options).wait(datetime.timedelta(seconds=SEND_SECONDS))
            if there.is_cuda:
                torch.cuda.synchronize(self._device)  # the buffer is filled again next
        except RuntimeError as error:  # an engine is lost: the others must not wait for the next bucket
            print(f"agentrl.train: weights group {self._group.name} is broken: {error}")
            self.close()
            return False
        return True


def _nccl() -> tuple[type, ...]:
    return (c10d.ProcessGroupNCCL,) if c10d.is_nccl_available() else ()


def _described(parts: Sequence[Sequence[Shape]]) -> list[dict[str, Any]]:
    return [
        {
            "names": [shape.name for shape in part],
            "dtypes": [str(shape.dtype).removeprefix("torch.") for shape in part],
            "shapes": [list(shape.shape) for shape in part],
        }
        for part in parts
    ]
