"""What the trainer can be told. Free of torch, so that a whole run's config is checked before anything starts."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["fp32", "bf16", "fp16"]
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"baseline": "group_mean", "aggregation": "fixed_length"},
    "rloo": {"baseline": "leave_one_out"},
    "dapo": {"clip_high": 0.28},
    "sft": {},
}
"""The algorithms shipped, with the settings in which each differs from the defaults below."""
_DECOUPLED_PPO = "agentrl.train.algorithm:Algorithm"
_CLASSES: Mapping[str, str] = {"sft": "agentrl.train.algorithms.sft:SFT"}
_SFT_KNOBS = frozenset({"name", "aggregation", "fixed_length"})


class AlgorithmOptions(BaseModel):
    """The objective. A setting without effect in the chosen algorithm is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "grpo"
    """grpo, dr_grpo, rloo, dapo, sft, or a class of your own as `package.module:Class`."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """ε below: a ratio π_θ/π_prox under 1-ε earns nothing more from a negative advantage."""
    clip_high: float = Field(0.2, ge=0)
    """ε above, for positive advantages."""
    dual_clip: float | None = Field(None, gt=1)
    """A negative advantage counts at most this many times (dual-clip PPO); None for no such limit."""
    behaviour: Literal["truncate", "mask", "off"] = "truncate"
    """What is done with w = π_prox/π_behave: cut at the cap, or tokens outside [1/cap, cap] left out, or w not used."""
    behaviour_cap: float = Field(5.0, gt=1)
    """The cap of w."""
    baseline: Literal["group_std", "group_mean", "leave_one_out", "none"] = "group_std"
    """What is taken from a return: the group's mean, divided by its deviation or not; the others' mean; nothing."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number: over all trained tokens of the step; the mean over episodes of their means;
    the sum over `fixed_length` × episodes. Denominators are global over ranks and micro-batches."""
    fixed_length: int | None = Field(None, gt=0)
    """The constant of `aggregation = "fixed_length"`, usually an episode's token budget."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Added to the objective times the policy's entropy at trained tokens."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a class of your own."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("name", "grpo"), str):
            return {**PRESETS.get(given.get("name", "grpo"), {}), **given}
        return given

    @model_validator(mode="after")
    def _every_knob_has_an_effect(self) -> AlgorithmOptions:
        given = self.model_fields_set
        if ":" not in self.name:
            if self.name not in PRESETS:
                near = difflib.get_close_matches(self.name, PRESETS, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"algorithm {self.name!r} is neither of {', '.join(PRESETS)} nor 'module:Class'{hint}")
            if self.args:
                raise ValueError(
                    f"args = {self.args} has no effect: {self.name!r} takes none, only your own class does"
                )
        if self.name == "sft" and (useless := given - _SFT_KNOBS - {"args"}):
            raise ValueError(f"{', '.join(sorted(useless))} has no effect with algorithm 'sft': remove it")
        if (self.aggregation == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(
                f"aggregation {self.aggregation!r} with fixed_length {self.fixed_length}: "
                "'fixed_length' needs a length (the token budget of an episode), the others must not have one"
            )
        if self.behaviour == "off" and "behaviour_cap" in given:
            raise ValueError("behaviour_cap has no effect with behaviour = 'off': remove one of them")
        return self

    @property
    def path(self) -> str:
        """`module:Class` of the algorithm."""
        return self.name if ":" in self.name else _CLASSES.get(self.name, _DECOUPLED_PPO)


class TrainOptions(BaseModel):
    """The optimizer, the batch and the checkpoints."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(100, ge=0)
    """Training steps; each takes a batch and makes one version of the weights."""
    batch_groups: int = Field(8, ge=1)
    """Groups a step."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps a batch, each on its share of the groups."""
    ranks: int = Field(1, ge=1)
    """Trainer processes, one a device."""
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up: stays, or falls to 0 at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the rate rises linearly from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decay; vectors (norms, biases) are exempt."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's."""
    max_grad_norm: float = Field(1.0, ge=0)
    """The gradient is scaled down to this global norm; 0 for no limit."""
    dtype: Dtype = "fp32"
    """Of forward, backward and the published weights; master weights and moments are always fp32."""
    tokens_per_microbatch: int = Field(8192, ge=2)
    """Packed tokens of one forward pass on one rank. A longer sequence makes a micro-batch of its own."""
    max_sequence: int | None = Field(None, ge=2)
    """Longer sequences are left out of the loss and counted; None for the model's own limit."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    checkpoint_every: int = Field(20, ge=0)
    """Steps between checkpoints; 0 for only one at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older checkpoints are deleted."""
    collective_timeout: float = Field(600.0, gt=0)
    """Seconds after which a rank that does not answer ends the group."""

    @model_validator(mode="after")
    def _fits(self) -> TrainOptions:
        if self.minibatches > self.batch_groups:
            raise ValueError(f"minibatches = {self.minibatches} cuts {self.batch_groups} groups: at most one each")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps} is longer than the run, steps = {self.steps}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas} must be in [0, 1)")
        return self


class TrainerJob(BaseModel):
    """What `trainer.json` holds: everything `python -m agentrl.train` needs besides $AGENTRL_TOKEN.

    Write it with `model_dump_json(exclude_unset=True)`: a default written out would count as a knob that was set.

    Step n makes version n: a job that starts at version v takes the batch of step v+1 first. With `resume` it
    publishes the checkpoint's weights under `incarnation.v` before anything else; without, the engines are expected to
    have been loaded from `model_dir`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    """The run's name, for logs."""
    train: TrainOptions
    algorithm: AlgorithmOptions
    model_dir: Path
    """A causal language model in Hugging Face form, with its tokenizer."""
    feed_url: str
    """The conductor's feed."""
    weights_dir: Path
    """Where the folders of new weights are made."""
    checkpoints_dir: Path
    """Where checkpoint folders are made."""
    seed: int = 0
    incarnation: int = Field(1, ge=1)
    """Counts continuations; part of every version's label."""
    resume: Path | None = None
    """A checkpoint folder to continue from, or None to start from `model_dir` at version 0."""


def check_algorithm(options: AlgorithmOptions) -> None:
    """ValueError where the algorithm's module does not exist; imports only its parents."""
    module, _, name = options.path.partition(":")
    if not name.isidentifier() or importlib.util.find_spec(module) is None:
        raise ValueError(f"algorithm {options.name!r}: no module {module!r} with a class {name!r} can be imported")
