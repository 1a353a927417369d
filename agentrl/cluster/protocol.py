"""What workers and the conductor say to each other: JSON over HTTP, every request with the cluster's token.

    POST /cluster/join    Join → Joined            a worker is there; it is named by a lease that no other one ever has
    POST /cluster/leave   Leave → {}               it goes
    POST /beat            Beat → Orders            every second, at a port of its own: what it does → what it is to do
    /feed/…                                        the trainer's feed, see docs/architecture.md
    /rollout/…                                     episodes to play, see agentrl/cluster/rollouts.py
    GET  /files/{name}, /files/{name}/{path}       folders by name, with a checksum a file; every worker serves them too

A worker's own server, besides /files: `POST /fetch` (get a folder), `POST /drop`, `/engine/…` (its engine).

Orders are a *wanted state*, not a command: the worker compares it with what runs, so a lost answer does no harm. Each
task has a generation, and a number is never used twice; what is not of the wanted generation is ended.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["engine", "trainer", "rollout"]
State = Literal["idle", "preparing", "running", "ended"]
BEAT_SECONDS = 1.0
IDLE_BEAT_SECONDS = 0.25
"""Of a worker without a task: an order waits for the next beat."""
AUTHORIZATION = "Authorization"


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Join(_Wire):
    """A worker introduces itself."""

    role: Role
    address: str
    """The base URL of its server."""
    host: str
    """Its address, for the trainer's collectives."""
    name: str
    """For people."""
    slots: int = Field(1, ge=1)
    """Trainer: the ranks that it runs."""
    version: str
    """Of agentrl."""
    probe: str | None = None
    """What it read at `Welcome.probe`, where the disk is to be shared."""


class Welcome(_Wire):
    """Answer to `GET /cluster`: what a worker must know before it joins."""

    run: str
    version: str
    probe: str | None
    """A file that a worker must be able to read; None where no disk is shared."""
    lost_seconds: float


class Joined(_Wire):
    """Answer to `Join`."""

    lease: str
    beats: int
    """The port of the conductor's host where beats are heard."""


class Leave(_Wire):
    """A worker goes by itself."""

    lease: str


class Source(_Wire):
    """A folder, and the servers that have it, the nearest first."""

    name: str
    urls: tuple[str, ...]


class EngineTask(_Wire):
    """Run an engine server on the model's weights."""

    kind: Literal["engine"] = "engine"
    generation: int
    options: dict[str, Any]
    """`EngineOptions`, as set."""
    model: Source


class TrainerTask(_Wire):
    """Run `ranks` of a trainer's group."""

    kind: Literal["trainer"] = "trainer"
    generation: int
    job: dict[str, Any]
    """`TrainerJob`, as set; the worker puts its own folders in where no disk is shared."""
    token: str
    """Of this incarnation's feed."""
    ranks: tuple[int, ...]
    world: int
    master: str
    port: int
    shared: bool
    model: Source
    reference: Source | None = None
    resume: Source | None = None


class RolloutTask(_Wire):
    """Play episodes."""

    kind: Literal["rollout"] = "rollout"
    generation: int
    config: dict[str, Any]
    """`RunConfig`, as set."""
    model: Source


Task = Annotated[EngineTask | TrainerTask | RolloutTask, Field(discriminator="kind")]


class Beat(_Wire):
    """What a worker does."""

    lease: str
    generation: int = 0
    """Of the task it works on; 0 for none."""
    state: State = "idle"
    code: int | None = None
    """Of a process that ended."""
    text: str = ""
    """How it ended, or what is prepared."""
    port: int = 0
    """A port that is free on the worker's host now."""


class Orders(_Wire):
    """The wanted state."""

    task: Task | None = None


class Fetch(_Wire):
    """Have this folder."""

    source: Source


class Drop(_Wire):
    """Forget these folders."""

    names: tuple[str, ...]
