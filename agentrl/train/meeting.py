"""Meeting the other ranks, and others in a process group outside the trainer's own. Needs torch alone."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

GATHER_SECONDS = 86400.0
"""Until the last rank comes, whose host may fetch a large model before. The conductor sees which one does not come."""
MEET_SECONDS = 120.0
"""Until all ranks are connected, once all have come."""
JOIN_SECONDS = 30.0
SEND_SECONDS = 60.0
"""How long one bucket may take to reach all engines."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def gather(world: int, seconds: float = GATHER_SECONDS) -> Store:
    """Wait until the last of the ranks has come to the store that the environment names; the store.

    From here on nobody has a reason to be late: what follows can have a limit in seconds.
    """
    store: Store = next(rendezvous("env://", timeout=datetime.timedelta(seconds=seconds)))[0]
    if store.add("agentrl/come", 1) == world:
        store.set("agentrl/all", "")
    store.wait(["agentrl/all"])
    return store


def apart(world: int, seconds: float) -> str:
    """What is said where ranks that have all come do not meet."""
    chosen = ", ".join(f"{name}={os.environ[name]}" for name in _INTERFACES if name in os.environ)
    return (
        f"all {world} ranks have come, but within {seconds:.0f} s this one was not connected to all others: see that "
        f"the hosts reach each other at all ports{chosen and f' over {chosen}'}"
    )


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
