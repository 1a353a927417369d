"""What a run may set about its engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_SGLANG_ONLY = ("python", "extra_args", "memory_fraction", "tensor_parallel", "gpus")


class EngineOptions(BaseModel):
    """The engine servers of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["embedded", "sglang"] = "embedded"
    """"embedded": our own engine on torch, for machines without SGLang. "sglang": a real SGLang server."""
    count: int = Field(1, ge=1)
    """How many servers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and cache while generating."""
    max_running: int = Field(64, ge=1)
    """Sequences that one server generates at once; more wait."""
    context_length: int | None = Field(None, ge=2)
    """The longest sequence, prompt included; the model's own where this is not set."""
    host: str = "127.0.0.1"
    """The address to serve on."""
    port: int | None = Field(None, ge=1, le=65535)
    """The first server's port, the others count up from it; free ones are chosen where this is not set."""
    startup_timeout: float = Field(300.0, gt=0)
    """Seconds until a server must be ready."""
    load_timeout: float = Field(300.0, gt=0)
    """Seconds that loading new weights may take."""
    chunk_tokens: int | None = Field(None, ge=1)
    """Generations are cut into requests of so many tokens, which changes nothing but the overhead; where not set,
    servers that cannot retract get 256 and the others no limit."""
    threads: int = Field(1, ge=1)
    """CPU threads a server computes with."""
    python: Path | None = None
    """SGLang: the interpreter that has it; this one where not set."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes the GPU where there is one."""
    tensor_parallel: int = Field(1, ge=1)
    """SGLang: GPUs a server."""
    gpus: tuple[int, ...] | None = None
    """SGLang: the GPUs of all servers in order, `tensor_parallel` each; where not set, all servers see all GPUs."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """SGLang on a GPU: the share of its memory for weights and cache."""
    extra_args: tuple[str, ...] = ()
    """SGLang: further command line arguments, e.g. ["--attention-backend", "fa3"]."""

    @property
    def hot_swap(self) -> bool:
        """Whether these servers load new weights beside the serving ones and change them between two tokens."""
        return self.kind == "embedded"

    @model_validator(mode="after")
    def _effective(self) -> Self:
        """A setting that has no effect is an error, not a silence."""
        if self.kind == "embedded":
            idle = [name for name in _SGLANG_ONLY if name in self.model_fields_set]
            if idle:
                raise ValueError(f"{', '.join(idle)} has no effect with kind = 'embedded': remove it, or use 'sglang'")
        if self.gpus is not None and len(self.gpus) != (needed := self.count * self.tensor_parallel):
            raise ValueError(
                f"gpus = {list(self.gpus)} names {len(self.gpus)} GPUs, and {self.count} servers of "
                f"{self.tensor_parallel} need {needed}"
            )
        if self.port is not None and self.port + self.count - 1 > 65535:
            raise ValueError(f"port {self.port} leaves no room for {self.count} servers: choose a lower one")
        return self
