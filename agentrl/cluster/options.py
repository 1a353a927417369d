"""Where a run's processes run. The same run goes from one machine to many by this section alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_REMOTE_ONLY = (
    "host",
    "port",
    "token_file",
    "shared_disk",
    "wait_seconds",
    "lost_seconds",
    "slow_seconds",
    "fanout",
    "ray_address",
    "ray_placement",
    "ray_engine",
    "ray_trainer",
    "ray_rollout",
)
_RAY_ONLY = ("ray_address", "ray_placement", "ray_engine", "ray_trainer", "ray_rollout")


class ClusterOptions(BaseModel):
    """Where engines, trainer ranks and rollouts run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["local", "external", "ray"] = "local"
    """"local": children of this process. "external": `agentrl worker` processes, started by Slurm, Kubernetes or hand,
    register here. "ray": the same workers, placed and started again by Ray."""
    rollout_workers: int = Field(0, ge=0)
    """Processes that play episodes. 0: the conductor plays them itself."""
    host: str = "127.0.0.1"
    """The address to listen on for workers: this machine's in the cluster's private network."""
    port: int = Field(7700, ge=0, le=65534)
    """The port for workers, whose beats come to the next one; 0 for any two free ones."""
    token_file: Path | None = None
    """A file with the secret that all workers know; $AGENTRL_CLUSTER_TOKEN where not set."""
    shared_disk: bool = False
    """The model's and the run's folders are there under the same path on every trainer host (it is tried at start).
    Otherwise models and checkpoints travel over HTTP, as weights always do."""
    wait_seconds: float = Field(600.0, gt=0)
    """How long the run waits for workers that it needs, at the start and after a loss."""
    lost_seconds: float = Field(6.0, ge=2)
    """A worker that was not heard of for so long is lost. Workers beat every second, and end what they run after two
    thirds of this without an answer."""
    slow_seconds: float = Field(60.0, gt=0)
    """An engine that takes longer to fetch or to load new weights is left behind, and serves again when it has them."""
    fanout: int = Field(2, ge=1)
    """Downloads of new weights that one host serves at a time; those who have them serve others."""
    ray_address: str | None = None
    """Ray: the cluster's address; None for the one that Ray finds, or a new one on this machine."""
    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray: how the placement group spreads over nodes."""
    ray_engine: dict[str, float] = Field(default_factory=dict)
    """Ray: resources of one engine, e.g. {CPU = 4, GPU = 1}; one CPU, and a GPU a tensor-parallel rank where the
    engine is SGLang on GPUs, where not set."""
    ray_trainer: dict[str, float] = Field(default_factory=dict)
    """Ray: resources of one trainer rank; one CPU where not set."""
    ray_rollout: dict[str, float] = Field(default_factory=dict)
    """Ray: resources of one rollout worker; one CPU where not set."""

    @model_validator(mode="before")
    @classmethod
    def _effective(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("kind", "local")
        idle = _REMOTE_ONLY if kind == "local" else _RAY_ONLY if kind == "external" else ("token_file",)
        if found := [name for name in idle if name in given]:
            raise ValueError(f"{', '.join(found)} has no effect with cluster.kind = {kind!r}: remove it")
        return given

    @model_validator(mode="after")
    def _listens_where_it_is_reached(self) -> Self:
        if self.host in ("0.0.0.0", "::"):
            raise ValueError(
                f"host = {self.host!r} would listen on public interfaces too: give this machine's address in the "
                "cluster's private network"
            )
        return self
