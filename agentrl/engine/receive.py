"""One engine's membership in a group that weights are broadcast over: SGLang's calls for it.

An engine joins once and then receives bucket after bucket in every publish. SGLang loads each bucket into the weights
that it serves, so it must be paused, and after a failure it holds a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from agentrl.engine.http import Http
from agentrl.errors import DeadlineExceeded, EngineError
from agentrl.types import Version

_CONTROL_SECONDS = 30.0


class Bucket(BaseModel):
    """Tensors that travel as one: their bytes end to end."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class Meeting(NamedTuple):
    """Where a group comes together: the store of its rank 0, which sends."""

    name: str
    address: str
    port: int
    world: int
    backend: str


class Member:
    """Speaks to one server, which may hold several of the group's ranks."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = Http(url)

    async def join(self, meeting: Meeting, first_rank: int, seconds: float) -> None:
        """Be ranks `first_rank` and on. The server generates nothing until all others have come."""
        body = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": first_rank,
            "world_size": meeting.world,
            "group_name": meeting.name,
            "backend": meeting.backend,
        }
        await self._call("/init_weights_update_group", body, seconds, "its place in the weights group")

    async def leave(self, name: str) -> None:
        """Forget the group; one that is broken or unknown is left too."""
        try:
            await self._call("/destroy_weights_update_group", {"group_name": name}, _CONTROL_SECONDS, "its leave")
        except (EngineError, DeadlineExceeded):
            return  # a server that is gone has left

    async def begin(self) -> None:
        """Open a session; `end` must follow whatever happens."""
        await self._call("/begin_weight_update", {}, _CONTROL_SECONDS, "the begin of an update")

    async def receive(self, group: str, version: Version, buckets: Sequence[Bucket], seconds: float) -> None:
        """Take all buckets in order; the last one brings the label and drops what the old weights computed."""
        for number, bucket in enumerate(buckets, 1):
            last = number == len(buckets)
            body = bucket.model_dump() | {
                "group_name": group,
                "load_format": "flattened_bucket",
                "flush_cache": last,
                "weight_version": str(version) if last else None,
                "abort_all_requests": False,
            }
            await self._call(
                "/update_weights_from_distributed", body, seconds, f"bucket {number} of {len(buckets)} of {version}"
            )

    async def end(self) -> None:
        """Close the session."""
        await self._call("/end_weight_update", {}, _CONTROL_SECONDS, "the end of an update")

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.close()

    async def _call(self, path: str, body: Mapping[str, Any], seconds: float, what: str) -> None:
        status, answer = await self._http.call(path, body, seconds, what)
        if status != 200 or not answer.get("success", True):
            raise EngineError(f"{self.url}{path} answered {status}: {answer.get('message') or answer}")
