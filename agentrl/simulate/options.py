"""What `agentrl simulate` reads besides a run's own config."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.conductor.config import RunConfig
from agentrl.rollout.options import RolloutOptions
from agentrl.simulate.cost import Spread, Workload


class SimulateOptions(BaseModel):
    """Devices, and what episodes are like. With `--from RUNS/X` that run says what is not given here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hardware: str = "h100"
    """A preset of `agentrl.simulate.presets`: a100, h100, h800, h200, b200."""
    model: str | None = None
    """The model's shape by name, e.g. qwen2.5-7b; None: that of `model`'s config.json."""
    gpus: int | None = Field(None, ge=2)
    """Devices to share out between engines and trainer: the best split is searched. None: as the config has it."""
    shares: tuple[float, ...] = (0.5, 0.625, 0.75, 0.8125, 0.875)
    """Shares of the devices for engines that are tried where `gpus` is set."""
    staleness: tuple[int, ...] | None = None
    """η that are tried; None: 0, 1, 2, 4, 8, 16 up to the bound, which is `rollout.staleness`."""
    interrupt: bool = True
    """Whether a publish stops engines at the next token, as agentrl's do; false: it waits for what runs."""

    response_mean: float | None = Field(None, gt=0)
    """Sampled tokens a turn. None: a third of `rollout.max_tokens` over an episode's turns."""
    response_sigma: float = Field(0.8, ge=0)
    """Of their logarithm. 0.8: the longest of a hundred is six times the median."""
    row_share: float = Field(0.5, ge=0, le=1)
    """The share of its variance that lies between rows, not between samples of a row."""
    prompt_mean: float = Field(512.0, ge=1)
    """Tokens before the first turn."""
    turns_mean: float | None = Field(None, ge=1)
    """Turns an episode. None: half of `rollout.max_turns`."""
    observation_mean: float = Field(64.0, ge=0)
    """Tokens that the environment adds after a turn."""
    tool_seconds: float = Field(0.1, ge=0)
    """Of `env.step`, lognormal with σ 1."""
    equal_share: float = Field(0.0, ge=0, lt=1)
    """The share of groups whose rewards are all equal; they are filtered where `rollout.filter_equal` says so."""

    steps: int = Field(8, ge=1)
    """Steps that are measured, after some that are not."""
    scale: int | None = Field(None, ge=1)
    """A k-th of the run is simulated, k times smaller in engines, groups and concurrency. None: the largest k that
    divides them and leaves 256 episodes a step."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if "shares" in self.model_fields_set and self.gpus is None:
            raise ValueError("shares has no effect without gpus: the config says how many engines and ranks there are")
        if not all(0 < share < 1 for share in self.shares):
            raise ValueError(f"shares = {list(self.shares)} must lie between 0 and 1")
        if self.staleness is not None and (not self.staleness or min(self.staleness) < 0):
            raise ValueError(f"staleness = {list(self.staleness)} must name at least one η >= 0")
        return self

    def workload(self, rollout: RolloutOptions) -> Workload:
        """Episodes as these options describe them."""
        turns = self.turns_mean or max(1.0, rollout.max_turns / 2)
        most = float(rollout.max_tokens)
        mean = self.response_mean or most / 3 / turns
        return Workload(
            response=Spread.lognormal(mean, self.response_sigma, most),
            prompt=Spread.lognormal(self.prompt_mean, 0.5),
            turns=Spread.lognormal(turns, 0.5 if turns > 1 else 0.0, float(rollout.max_turns)),
            observation=Spread(self.observation_mean),
            tool=Spread.lognormal(self.tool_seconds, 1.0) if self.tool_seconds else Spread(0.0),
            row_share=self.row_share,
            equal_share=self.equal_share,
        )


class SimulateConfig(RunConfig):
    """A run's config and, if one likes, a section `[simulate]`, which `agentrl train` does not know."""

    simulate: SimulateOptions = SimulateOptions()
