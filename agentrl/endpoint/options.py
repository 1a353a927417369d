"""Settings of the endpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EndpointOptions(BaseModel):
    """How messages become tokens and back, and how the HTTP app behaves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str = "policy"
    """What `/v1/models` lists and replies call the model; requests may name any."""
    history: Literal["append", "template"] = "append"
    """"append" keeps what was sampled in the context, thinking included: one trajectory an episode. "template" renders
    as the model's chat template would for a fresh chat, which may drop earlier thinking and so starts new
    trajectories."""
    unproven_template: Literal["refuse", "turn"] = "refuse"
    """A chat template that cannot be continued exactly is refused at start, or every turn becomes its own trajectory
    ("turn")."""
    tool_format: Literal["auto", "hermes", "qwen3_coder", "llama3_json", "json", "none"] = "auto"
    """How the model writes tool calls; "auto" reads it off the chat template."""
    untrained_sampling: Literal["refuse", "mark"] = "refuse"
    """In a training session, settings that change the distribution but not the log-prob (top_p, penalties, grammars)
    are refused, or their tokens are marked as not to be trained."""
    context_length: int | None = Field(default=None, gt=0)
    """Tokens of prompt and completion together; by default what the model's own files say."""
    call_timeout: float = Field(default=600.0, gt=0)
    """Seconds that one call may take, queueing included."""
    max_calls: int = Field(default=4096, gt=0)
    """Calls in flight over HTTP at once; beyond it the answer is 429 with Retry-After."""
    retry_grace: float = Field(default=2.0, ge=0)
    """Seconds that a generation outlives its client's disconnect, so that the client's own retry gets the first
    result."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for agents on other machines."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
