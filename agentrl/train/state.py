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
    sound: State | None = None
    """Where it was when the weights became what they are; None: now, or where it began."""
    skipped: int = 0
    """Optimizer steps that were not applied."""
    skipped_in_a_row: int = 0

    def trained(self, step: int, take: int, cursor: Mapping[str, Any], *, applied: int, skipped: int) -> None:
        """A step is done, of which so many optimizer steps were applied and skipped."""
        if not skipped or applied:
            self.sound = None
        elif self.sound is None:
            self.sound = State(self.step, self.take, self.cursor)
        self.step, self.take, self.cursor = step, take, cursor
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def due(self, every: int) -> bool:
        """Whether a checkpoint should have been made since the last one, in this step or a skipped one."""
        return every > 0 and self.step // every > self.saved // every

    def unsaved(self) -> State | None:
        """What a checkpoint at the end is to hold: these weights, at the last step that was not skipped."""
        last = self.sound or self
        return last if last.step > self.saved else None

    def version(self, incarnation: int) -> Version:
        """The label of the present weights."""
        return Version(incarnation, self.step)
