"""Weights by broadcast: SGLang's calls for a process group with a trainer, received beside the weights that serve.

A session gathers buckets. Its end builds and swaps them in if the last one brought a label, and drops them otherwise: a
transfer that breaks changes nothing.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from aiohttp import web
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from agentrl.engine.embedded.parameters import Weights, assemble, expected_shapes, held
from agentrl.engine.embedded.protocol import BucketBody, JoinBody, LeaveBody, answer, read
from agentrl.engine.embedded.shape import ModelShape
from agentrl.engine.weights import check_shapes
from agentrl.errors import ConfigError

_JOIN = datetime.timedelta(seconds=30)
_RECEIVE = datetime.timedelta(seconds=120)


class GroupRefused(Exception):
    """A call that cannot be done now; nothing has changed."""


class Receiver:
    """`swap(weights, label)` puts a whole version in place."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        swap: Callable[[Weights, str], Awaitable[None]],
    ) -> None:
        self._shape, self._dtype, self._device, self._swap = shape, dtype, device, swap
        self._groups: dict[str, Any] = {}
        self._named: dict[str, Tensor] | None = None
        self._label: str | None = None

    def routes(self) -> list[web.RouteDef]:
        """Of SGLang's protocol."""
        return [
            web.post("/init_weights_update_group", self.join),
            web.post("/destroy_weights_update_group", self.leave),
            web.post("/begin_weight_update", self.begin),
            web.post("/update_weights_from_distributed", self.receive),
            web.post("/end_weight_update", self.end),
        ]

    async def join(self, request: web.Request) -> web.Response:
        """Meet the others; generation goes on meanwhile."""
        body = await read(request, JoinBody)
        if body.backend != "gloo":
            raise GroupRefused(f"backend {body.backend!r}: the embedded engine receives over 'gloo'")
        try:
            self._groups[body.group_name] = await asyncio.to_thread(_join, body)
        except RuntimeError as error:
            raise GroupRefused(f"group {body.group_name!r} did not come together: {error}") from error
        return _done()

    async def leave(self, request: web.Request) -> web.Response:
        """Forget a group."""
        body = await read(request, LeaveBody)
        if self._groups.pop(body.group_name, None) is None:
            raise GroupRefused(f"there is no group {body.group_name!r}")
        return _done()

    async def begin(self, request: web.Request) -> web.Response:
        """Open a session."""
        if self._named is not None:
            raise GroupRefused("a weight-update session is open: end it first")
        self._named, self._label = {}, None
        return _done()

    async def receive(self, request: web.Request) -> web.Response:
        """One bucket."""
        body = await read(request, BucketBody)
        group, named = self._groups.get(body.group_name), self._named
        if group is None or named is None:
            what = "open session: begin_weight_update first" if named is None else f"group {body.group_name!r}: join it"
            raise GroupRefused(f"there is no {what}")
        if body.load_format != "flattened_bucket":
            raise GroupRefused(f"load_format {body.load_format!r}: the embedded engine takes 'flattened_bucket'")
        try:
            named |= await asyncio.to_thread(self._received, group, body)
        except (RuntimeError, AttributeError) as error:
            raise GroupRefused(f"bucket of {len(body.names)} tensors did not arrive: {error}") from error
        self._label = body.weight_version
        return _done()

    async def end(self, request: web.Request) -> web.Response:
        """Close the session; what has come whole, serves."""
        if self._named is None:
            raise GroupRefused("no weight-update session is open")
        named, self._named = self._named, None
        if self._label is None:
            return _done()
        try:
            shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
            check_shapes(shapes, expected_shapes(self._shape), tied=self._shape.tied)
        except ConfigError as error:
            raise GroupRefused(str(error)) from error
        weights = await asyncio.to_thread(assemble, named, self._shape)
        await self._swap(weights, self._label)
        return _done()

    def _received(self, group: Any, body: BucketBody) -> dict[str, Tensor]:
        dtypes = [getattr(torch, name) for name in body.dtypes]
        sizes = [t.itemsize * torch.Size(s).numel() for t, s in zip(dtypes, body.shapes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([flat], options).wait(_RECEIVE)
        parts = zip(body.names, torch.split(flat, sizes), dtypes, body.shapes, strict=True)
        return {n: held(p.view(dtype).view(shape), self._dtype, self._device) for n, p, dtype, shape in parts}


def _done() -> web.Response:
    return answer({"success": True, "message": "Success"})


def _join(body: JoinBody) -> Any:
    """The keys are those under which `torch.distributed` would meet; `agentrl/train/broadcast.py` does the same."""
    store = TCPStore(body.master_address, body.master_port, body.world_size, False, _JOIN)
    keys = PrefixStore(f"{body.group_name}/", PrefixStore(body.group_name, store))
    return c10d.ProcessGroupGloo(PrefixStore("cpu/", keys), body.rank_offset, body.world_size, _JOIN)
