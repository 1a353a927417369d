"""Settings of the rewards in this room."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Marker(StrEnum):
    """Where an answer stands in a completion; without its marker there is no answer."""

    MARKED = "marked"
    r"""The last `\boxed{…}`; where there is no box at all, the last line "Final Answer: …"."""
    BOXED = "boxed"
    r"""The last `\boxed{…}` (or `\fbox{…}`) alone."""
    FINAL_ANSWER = "final_answer"
    """The last line "Final Answer: …" alone."""
    LAST_NUMBER = "last_number"
    """The last number, whatever stands around it."""
    GSM8K = "gsm8k"
    """What follows the last `####`."""
    WHOLE = "whole"
    """The whole completion."""


class MathOptions(BaseModel):
    """How `verify` reads and compares."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    marker: Marker = Marker.MARKED
    """Where the answer stands."""
    relative_tolerance: float = Field(0.0, ge=0, lt=1)
    """0 is exact. 0.01 lets a number without symbols differ from the gold by one percent of the larger."""
    lenient_percent: bool = False
    """Accept 35 for 35 %, and 35 % for 35."""
    seconds: float = Field(4.0, gt=0, le=60)
    """A comparison that computes for longer is stopped, and the answer counts as wrong. Seconds of CPU time, and ten
    times as many by the clock: what else the machine does makes no answer wrong."""


class JudgeOptions(BaseModel):
    """How a judge model is asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    """Of any OpenAI-compatible server."""
    model: str
    api_key_env: str | None = None
    """The environment variable that holds the key; no key is sent where it is not given."""
    prompt: str = (
        "Question:\n{question}\n\nReference answer:\n{answer}\n\nAnswer to judge:\n{completion}\n\n"
        "Is the answer correct? Reason briefly, then end with one line: Score: <a number from 0 to 10>"
    )
    """Filled with the row's fields and `completion`. The reply must end in a line "Score: number"."""
    lowest: float = 0.0
    """The score that becomes 0."""
    highest: float = 10.0
    """The score that becomes 1; one outside lowest to highest is no verdict."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=1)
    """Of the judge's reply."""
    retries: int = Field(3, ge=0)
    """After refusals, lost connections and replies without a score, with waits that double from half a second."""
    seconds: float = Field(60.0, gt=0)
    """For one request."""
    concurrency: int = Field(16, ge=1)
    """Requests at once; the others wait their turn."""
    budget_tokens: int | None = Field(None, ge=1)
    """Tokens (prompt and reply) that this judge may use in all; then every verdict is "none"."""


class PartOptions(BaseModel):
    """One part of a composed reward."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """`package.module:f` or `path/to/file.py:f`: a function `(completion, row)`, or a class of such (with `args`)."""
    weight: float = 1.0
    """The part's value is logged unweighted. With weight 0 it is logged only."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function at each call, or of the class once."""
    worker: bool = False
    """Run it in a worker process that is killed at its deadline; needs a plain (not async) function."""
    seconds: float = Field(30.0, gt=0)
    """Its deadline. A part that misses it has no verdict."""
