"""When a run is ill: failures in a row, filtered groups in a row, and silence, each with a bound and a clear error."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agentrl.errors import RunError
from agentrl.rollout.episode import Outcome
from agentrl.rollout.options import RolloutOptions
from agentrl.rollout.player import INFRASTRUCTURE
from agentrl.wire import legible

_LONGEST_PAUSE = 1.0


class Health:
    """Counts what finished groups tell. Times are `loop.time()` seconds."""

    def __init__(self, options: RolloutOptions) -> None:
        self._options = options
        self._moved = 0.0
        self._failed = 0
        self._failing_since = 0.0
        self._filtered = 0
        self._infrastructure = False
        self._errors: deque[str] = deque(maxlen=3)
        self._cause: Exception | None = None

    @property
    def pause(self) -> float:
        """Seconds to wait before the next group, where infrastructure fails: not to burn rows on a dead engine."""
        return min(0.05 * 2 ** min(self._failed, 10), _LONGEST_PAUSE) if self._failed and self._infrastructure else 0.0

    def moved(self, now: float) -> None:
        """Something ended, or the first group after an idle time began."""
        self._moved = now

    def saw(self, outcomes: Sequence[Outcome]) -> None:
        """Remember what went wrong in a group's episodes."""
        for outcome in outcomes:
            if outcome.error is not None:
                self._cause = outcome.error
            if outcome.episode.error is not None:
                self._errors.append(f"group {outcome.episode.group}: {outcome.episode.error}")
        unscored = [o.episode.stop for o in outcomes if not o.episode.scored]
        self._infrastructure = bool(unscored) and all(stop in INFRASTRUCTURE for stop in unscored)

    def wrong(self, group: int, error: Exception | None) -> None:
        """Remember what a whole group's reward raised."""
        if error is not None:
            self._cause = error
            self._errors.append(legible(f"group {group}: the group reward raised {type(error).__name__}: {error}"))

    def settled(self, fate: str, now: float) -> RunError | None:
        """A group ended; the error that is to end the run, if it was one too many."""
        self._moved = now
        if fate == "given_up":
            self._failing_since = now if self._failed == 0 else self._failing_since
            self._failed += 1
            return self._too_many_failed(now)
        self._failed = 0
        if fate != "filtered":
            self._filtered = 0
            return None
        self._filtered += 1
        if self._filtered < self._options.max_filtered:
            return None
        return RunError(
            f"{self._filtered} groups in a row had all rewards equal, so none can be trained on: the task is too hard "
            "or too easy for the model, or the reward is constant. Look at the episodes, raise samples or temperature, "
            "or set rollout.max_filtered higher"
        )

    def stalled(self, now: float) -> bool:
        """Whether nothing ended for too long."""
        return now - self._moved > self._options.stall

    def stall(self, waits_for: str) -> RunError:
        """The error of a stall."""
        return self._error(f"no group ended for {self._options.stall:.0f} s while some run: {waits_for}")

    def failure(self, what: str) -> RunError:
        """An error with the cause and the last three errors."""
        return self._error(what)

    def _too_many_failed(self, now: float) -> RunError | None:
        patient = self._infrastructure and now - self._failing_since < self._options.fail_seconds
        if self._failed < self._options.max_failed or patient:
            return None
        return self._error(f"{self._failed} groups in a row failed")

    def _error(self, what: str) -> RunError:
        last = "".join(f"\n  {text}" for text in self._errors) or "\n  none"
        error = RunError(f"{what}. The last errors:{last}")
        error.__cause__ = self._cause
        return error
