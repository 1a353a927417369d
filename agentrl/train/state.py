"""Where a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.types import Version


@dataclass
class State:
    """Step n has made version n. `take` and `cursor` are those of the last batch that was trained."""

    step: int = 0
    take: int = -1
    cursor: Mapping[str, Any] = field(default_factory=dict)
    saved: int = 0
    """The step of the last checkpoint; a run that has not trained has nothing to save."""
    skipped: int = 0
    """Optimizer steps that were not applied."""
    skipped_in_a_row: int = 0

    def version(self, incarnation: int) -> Version:
        """The label of the present weights."""
        return Version(incarnation, self.step)
