"""Meeting others in a process group outside the trainer's own. Needs torch alone."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

JOIN_SECONDS = 30.0
SEND_SECONDS = 60.0
"""How long one bucket may take to reach all engines."""


def join(store: Store, name: str, rank: int, world: int, backend: str) -> Any:
    """A member of group `name`, which meets the others under the keys that `torch.distributed` would use for it."""
    wait = datetime.timedelta(seconds=JOIN_SECONDS)
    store = PrefixStore(f"{name}/", PrefixStore(name, store))
    if backend == "gloo":
        group = c10d.ProcessGroupGloo(PrefixStore("cpu/", store), rank, world, wait)
        group.options.global_ranks_in_group = []
        return group
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=SEND_SECONDS)
    return c10d.ProcessGroupNCCL(PrefixStore("cuda/", store), rank, world, options)
