"""What this machine offers to model-written code, and what each kind of box would contain: for `agentrl doctor`."""

from __future__ import annotations

import asyncio
import warnings
from typing import NamedTuple

from agentrl.errors import AgentRLError
from agentrl.sandbox.cgroup import make_cgroup
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.pool import KINDS, open_sandbox

CONTAINS = {
    "bubblewrap": "files, network, processes, users, disk; memory, processes and CPU of the whole box with cgroups",
    "docker": "files, network, processes, users, disk, memory, CPU",
    "subprocess": "NOTHING: limits against accidents only; trusted code only",
}


class Offer(NamedTuple):
    """One kind of box on this machine."""

    kind: str
    works: bool
    contains: str
    reason: str
    """Why it does not work and what to do; or what is missing though it works; "" for nothing."""


def survey(docker_url: str = "") -> list[Offer]:
    """Every kind on the shelf, tried by starting a box and running a program in it (2–15 s)."""
    return [asyncio.run(_offer(kind, docker_url if kind == "docker" else "")) for kind in KINDS]


async def _offer(kind: str, docker_url: str) -> Offer:
    options = SandboxOptions(kind=kind, slots=1, docker_url=docker_url)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = open_sandbox(options)
        async with pool, pool.box() as box:
            done = await box.exec(["python3", "-c", "print(1)"])
    except AgentRLError as error:
        return Offer(kind, False, CONTAINS[kind], str(error))
    if not done.ok:
        return Offer(kind, False, CONTAINS[kind], f"a program that prints ended with {done}")
    return Offer(kind, True, CONTAINS[kind], _shortcoming(kind, options))


def _shortcoming(kind: str, options: SandboxOptions) -> str:
    if kind != "bubblewrap":
        return ""
    cgroup = make_cgroup("doctor", options)
    if cgroup is None:
        return (
            "no cgroup can be made here: memory is limited for each process, CPU not at all; root can, or delegate one"
        )
    cgroup.remove()
    return ""
