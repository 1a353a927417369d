"""Settings of rollouts: batch and group sizes, staleness, limits of an episode, retries."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RolloutOptions(BaseModel):
    """How groups of episodes are played and when they may be trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups_per_step: int = Field(default=8, ge=1)
    """Groups (data rows) in one training batch: the design's B."""
    samples: int = Field(default=8, ge=1)
    """Episodes of one row that are to be scored: the design's n."""
    extra_samples: int = Field(default=0, ge=0)
    """Episodes started beyond `samples`; a group goes as soon as `samples` are scored and the rest is cancelled."""
    min_scored: int | None = Field(default=None, ge=1)
    """A group with fewer scored episodes is given up; None: half of `samples`, rounded up."""
    straggler_seconds: float | None = Field(default=None, gt=0)
    """Once `min_scored` episodes are scored, how long the others may still take; None: up to `time_limit`."""
    staleness: int = Field(default=4, ge=0)
    """η: no token is trained on that is more than this many versions old when its step starts; 0 is synchronous."""
    when_stale: Literal["wait", "drop"] = "wait"
    """`wait`: no step is taken that would push a live group past η. `drop`: such groups are cancelled, asked again."""
    keep_abandoned: bool = False
    """After a resume from a checkpoint, keep finished groups with tokens of the weights that it abandoned, where they
    are within η: back to the checkpoint counts like the same way forward. False: their rows are asked again."""
    concurrency: int | None = Field(default=None, ge=1)
    """Episodes that run at once; None: as many as the staleness bound admits."""
    max_turns: int = Field(default=16, ge=1)
    """Turns of one episode."""
    max_tokens: int = Field(default=4096, ge=1)
    """Tokens that the policy may sample in one episode."""
    time_limit: float = Field(default=600.0, gt=0)
    """Seconds of one episode, from reset to its last step."""
    close_seconds: float = Field(default=30.0, gt=0)
    """Seconds that `env.close` may take."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature in training."""
    retries: int = Field(default=2, ge=0)
    """How often an episode is played again, same row and seed, after an infrastructure fault."""
    max_asks: int = Field(default=8, ge=1)
    """How often a row is asked again after its group grew too old, before it is given up (`when_stale = "drop"`)."""
    group_reward: str | None = None
    """`package.module:function` or `file.py:function`, of a row's scored episodes: what each earns besides."""
    filter_equal: bool = True
    """Leave out groups whose rewards are all equal: without a critic they carry no signal."""
    max_filtered: int = Field(default=512, ge=1)
    """Groups filtered in a row before the run ends with an error."""
    max_failed: int = Field(default=16, ge=1)
    """Groups failed in a row before the run ends with an error."""
    fail_seconds: float = Field(default=25.0, ge=0)
    """Where infrastructure is at fault: only when every group failed for this long does `max_failed` end the run."""
    stall_seconds: float | None = Field(default=None, gt=0)
    """Seconds without any finished group, while some run, before the run ends with an error; None: as long as an
    episode with all its retries may take, and a minute."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data; None: until the trainer's last step."""
    shuffle: bool = True
    """A new order of the rows in each epoch, from the run's seed alone."""

    @property
    def keep(self) -> int:
        """How many updates off the surviving weights a kept token may be."""
        return self.staleness if self.keep_abandoned else 0

    @property
    def needed(self) -> int:
        """How many scored episodes make a group."""
        return self.min_scored if self.min_scored is not None else (self.samples + 1) // 2

    @property
    def started(self) -> int:
        """How many episodes a group starts."""
        return self.samples + self.extra_samples

    @property
    def stall(self) -> float:
        """Seconds without any finished group that are a stall."""
        return self.stall_seconds if self.stall_seconds is not None else self.longest + 2 * self.close_seconds + 60.0

    @property
    def longest(self) -> float:
        """Seconds that an episode with all its retries may take; beyond, its code ignores cancellation."""
        return (self.retries + 1) * (self.time_limit + 2 * self.close_seconds + 10.0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.keep_abandoned and self.staleness == 0:
            raise ValueError("keep_abandoned has no effect with staleness = 0: nothing else than the newest is trained")
        if self.needed > self.samples:
            raise ValueError(f"min_scored {self.min_scored} is more than samples {self.samples}: no group could count")
        if self.concurrency is not None and self.concurrency < self.started:
            raise ValueError(
                f"concurrency {self.concurrency} is less than the {self.started} episodes of one group: no group could "
                f"start; set it to at least {self.started}, or lower samples"
            )
        if self.straggler_seconds is not None and self.needed == self.started:
            raise ValueError(
                f"straggler_seconds has no effect: all {self.started} episodes are needed; lower min_scored"
            )
        if self.straggler_seconds is not None and self.straggler_seconds >= self.time_limit:
            raise ValueError(
                f"straggler_seconds {self.straggler_seconds} has no effect beyond time_limit {self.time_limit}"
            )
        if self.samples == 1 and self.filter_equal:
            raise ValueError(
                "with samples = 1 all rewards of a group are equal: set filter_equal = false (and a critic)"
            )
        if self.stall_seconds is not None and self.stall_seconds <= self.time_limit:
            raise ValueError(f"stall_seconds {self.stall_seconds} must be more than time_limit {self.time_limit}")
        return self
