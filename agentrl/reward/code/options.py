"""Settings of the code reward."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CodeOptions(BaseModel):
    """How programs are graded. A row may set its own `time_limit_s` and `float_tolerance`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: float = Field(6.0, gt=0, le=600)
    """Time limit of one test, from the start of the program."""
    budget: float = Field(30.0, gt=0)
    """Time limit of all tests of one answer together; what is left over then counts as timed out."""
    partial: bool = False
    """Reward the share of tests that pass, instead of 1 for all and 0 otherwise."""
    tolerance: float = Field(1e-6, ge=0, lt=1)
    """Relative tolerance where a float is expected."""
    queue_seconds: float = Field(600.0, gt=0)
    """Longest wait for a free box; after that there is no verdict. Time limits do not run while an answer waits."""
    most_waiting: int = Field(4096, ge=1)
    """Answers that may be in the queue; one more gets no verdict."""
