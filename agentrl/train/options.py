"""What the trainer can be told. Free of torch, so that a whole run's config is checked before anything starts."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["fp32", "bf16", "fp16"]
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
Level = Literal["token", "sequence", "geometric"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"baseline": "none", "whiten": "batch", "kl_in": "reward", "kl_estimator": "k1"},
    "grpo": {},
    "dr_grpo": {"baseline": "group_mean", "aggregation": "fixed_length"},
    "rloo": {"baseline": "leave_one_out"},
    "reinforce_pp": {"baseline": "none", "whiten": "batch", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp_baseline": {"baseline": "group_mean", "whiten": "batch", "kl_estimator": "k2"},
    "dapo": {"clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "tis": {"behaviour": "truncate", "behaviour_cap": 2.0},
    "icepop": {"behaviour": "mask", "behaviour_floor": 0.5, "behaviour_cap": 5.0},
    "sft": {},
}
"""The algorithms shipped, with the settings in which each differs from the defaults below."""
_DECOUPLED_PPO = "agentrl.train.algorithm:Algorithm"
_CLASSES: Mapping[str, str] = {
    name: f"agentrl.train.algorithms.{name}:{name.upper()}" for name in ("ppo", "gspo", "cispo", "sft")
}
_SFT_KNOBS = frozenset({"name", "aggregation", "fixed_length"})
_CRITIC_KNOBS = frozenset({"gae_lambda", "gae_steps", "value_coef", "value_clip", "value_rate"})
_KL_KNOBS = frozenset({"kl_in", "kl_estimator", "reference"})
_OVERLONG_KNOBS = frozenset({"overlong_buffer", "overlong_penalty"})


class AlgorithmOptions(BaseModel):
    """The objective. A setting without effect in the chosen algorithm is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "grpo"
    """ppo (with a critic), grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, dapo, gspo, cispo, tis, icepop,
    sft, or a class of your own as `package.module:Class`."""

    # ---- the surrogate
    clip_low: float = Field(0.2, ge=0, le=1)
    """ε below: a ratio π_θ/π_prox under 1-ε earns nothing more from a negative advantage."""
    clip_high: float = Field(0.2, ge=0)
    """ε above, for positive advantages."""
    dual_clip: float | None = Field(None, gt=1)
    """A negative advantage counts at most this many times (dual-clip PPO); None for no such limit."""
    behaviour: Literal["truncate", "mask", "off"] = "truncate"
    """What is done with w = π_prox/π_behave: cut at the cap, or w = 0 outside [floor, cap], or w not used."""
    behaviour_cap: float = Field(5.0, gt=1)
    """The cap of w."""
    behaviour_floor: float | None = Field(None, gt=0, lt=1)
    """The floor of w for `behaviour = "mask"`; None for 1/cap."""
    behaviour_level: Level = "token"
    """w of each token; or of its whole sequence (one trajectory), as the product or the geometric mean of its
    tokens'."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number: over all trained tokens of the step; the mean over episodes of their means;
    the sum over `fixed_length` × episodes. Denominators are global over ranks and micro-batches."""
    fixed_length: int | None = Field(None, gt=0)
    """The constant of `aggregation = "fixed_length"`, usually an episode's token budget."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Added to the objective times the policy's entropy at trained tokens."""

    # ---- rewards and credit
    reward_scale: float = Field(1.0, gt=0)
    """Each turn's reward is multiplied by this."""
    reward_clip: float | None = Field(None, gt=0)
    """Then cut to ± this."""
    overlong_tokens: int | None = Field(None, gt=0)
    """An episode that sampled more tokens loses `overlong_penalty`; None for no penalty on length."""
    overlong_buffer: int = Field(0, ge=0)
    """The penalty grows linearly over the last so many tokens before that (DAPO's soft punishment)."""
    overlong_penalty: float = Field(1.0, gt=0)
    """The full penalty, in units of the scaled reward."""
    leave_out_truncated: bool = False
    """Episodes that did not finish by themselves are not trained (DAPO's over-long filtering); they stay in
    baselines."""
    credit: Literal["episode", "turn"] = "episode"
    """What a turn is credited with: all that the episode earned, or what it earned from that turn on."""
    agents: Literal["together", "each"] = "together"
    """Where several agents act in an episode: they share all rewards, or each has its own, with its own baseline."""
    discount: float = Field(1.0, gt=0, le=1)
    """γ: of later turns for `credit = "turn"`; of later time steps for a critic."""
    baseline: Literal["group_std", "group_mean", "leave_one_out", "none"] = "group_std"
    """What is taken from a return: the group's mean, divided by its deviation or not; the others' mean; nothing."""
    whiten: Literal["off", "group", "batch"] = "off"
    """Advantages are shifted to mean 0 and scaled to deviation 1 over the trained tokens of each group, or of all."""

    # ---- the reference policy
    kl_coef: float = Field(0.0, ge=0)
    """β of the KL divergence from the reference; 0 for no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it is: added to the loss, or taken from the reward token by token."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """log r, (log r)²/2, or 1/r - 1 + log r, with r = π/π_ref."""
    reference: Path | None = None
    """The reference's folder in Hugging Face form; None for the model that the run starts from."""

    # ---- the critic
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    gae_steps: Literal["token", "turn"] = "token"
    """The time step of γ and λ."""
    value_coef: float = Field(0.5, gt=0)
    """The value loss's factor: the critic shares the policy's hidden states."""
    value_clip: float | None = Field(0.2, gt=0)
    """Values are moved by at most this much in a step, as seen by their loss; None for no limit."""
    value_rate: float = Field(10.0, gt=0)
    """The critic's head learns at this many times `train.lr`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a class of your own."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("name", "grpo"), str):
            return {**PRESETS.get(given.get("name", "grpo"), {}), **given}
        return given

    @model_validator(mode="after")
    def _known_name(self) -> AlgorithmOptions:
        if ":" in self.name:
            return self
        if self.name not in PRESETS:
            near = difflib.get_close_matches(self.name, PRESETS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"algorithm {self.name!r} is neither of {', '.join(PRESETS)} nor 'module:Class'{hint}")
        if self.args:
            raise ValueError(f"args = {self.args} has no effect: {self.name!r} takes none, only your own class does")
        return self

    @model_validator(mode="after")
    def _settings_agree(self) -> AlgorithmOptions:
        if (self.aggregation == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(
                f"aggregation {self.aggregation!r} with fixed_length {self.fixed_length}: "
                "'fixed_length' needs a length (the token budget of an episode), the others must not have one"
            )
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer = {self.overlong_buffer} is longer than overlong_tokens = {self.overlong_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _every_knob_has_an_effect(self) -> AlgorithmOptions:
        preset = PRESETS.get(self.name, {})
        given = {k for k in self.model_fields_set if k not in preset or self.__dict__[k] != preset[k]}
        if self.name == "sft" and (useless := given - _SFT_KNOBS - {"args"}):
            raise ValueError(f"{', '.join(sorted(useless))} has no effect with algorithm 'sft': remove it")
        for knobs, reason in self._without_effect():
            if useless := given & knobs:
                raise ValueError(f"{', '.join(sorted(useless))} has no effect with {reason}: remove one of them")
        return self

    def _without_effect(self) -> Iterator[tuple[frozenset[str], str]]:
        if self.behaviour == "off":
            yield frozenset({"behaviour_cap", "behaviour_level"}), "behaviour = 'off'"
        if self.behaviour != "mask":
            yield frozenset({"behaviour_floor"}), f"behaviour = {self.behaviour!r}"
        if self.kl_coef == 0:
            yield _KL_KNOBS, "kl_coef = 0"
        if self.overlong_tokens is None:
            yield _OVERLONG_KNOBS, "overlong_tokens unset"
        if ":" in self.name:
            return  # a class of one's own may read any of them
        if self.kl_coef > 0 and (self.kl_in, self.kl_estimator) == ("loss", "k1"):
            reason = "kl_in = 'loss' and kl_estimator = 'k1', whose gradient is 0 on average (take 'k2' or 'k3')"
            yield frozenset({"kl_coef"}), reason
        if self.name in ("gspo", "cispo"):
            yield frozenset({"dual_clip"}), f"algorithm {self.name!r}"
        if self.name == "ppo":
            yield frozenset({"baseline", "credit", "agents"}), "a critic"
        else:
            yield _CRITIC_KNOBS, f"algorithm {self.name!r}, which has no critic"
            if self.credit == "episode":
                yield frozenset({"discount"}), "credit = 'episode'"

    @property
    def path(self) -> str:
        """`module:Class` of the algorithm."""
        return self.name if ":" in self.name else _CLASSES.get(self.name, _DECOUPLED_PPO)

    @property
    def contrasts(self) -> bool:
        """Whether a group learns only from its episodes' rewards being different: equal ones teach it nothing."""
        shaped = self.overlong_tokens is not None or self.credit == "turn" or self.agents == "each"
        return ":" not in self.name and self.name != "sft" and self.baseline != "none" and not shaped


class LoraOptions(BaseModel):
    """Low-rank adapters: W stays as it is, and up·down·alpha/rank is added to it and trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1)
    """Of each adapter."""
    alpha: float = Field(32.0, gt=0)
    """The adapter counts alpha/rank times."""
    targets: tuple[str, ...] = Field(("*",), min_length=1)
    """Patterns of the linear layers that get one, e.g. "*.q_proj"; all but the output head as it stands."""


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
    gpus: tuple[int, ...] | None = None
    """The GPU of each rank; where not set, rank i takes the i-th that is visible."""
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
    trainable: tuple[str, ...] = Field(("*",), min_length=1)
    """Patterns of the weights that are trained, by their Hugging Face names: "*.self_attn.*" trains attention only."""
    frozen: tuple[str, ...] = ()
    """Patterns of the weights that are not, even where `trainable` names them: "model.layers.[0-3].*"."""
    lora: LoraOptions | None = None
    """Train adapters instead of weights. They are merged into what is published and exported."""
    offload_optimizer: bool = False
    """Keep master weights and moments in the host's memory, and step there: for a GPU that is too small for them."""
    tokens_per_microbatch: int = Field(8192, ge=2)
    """Packed tokens of one forward pass on one rank. A longer sequence makes a micro-batch of its own."""
    max_sequence: int | None = Field(None, ge=2)
    """Longer sequences are left out of the loss and counted; None for the model's own limit."""
    threads: int = Field(1, ge=1)
    """CPU threads that a rank computes with, where there is no GPU. More than one helps where engines leave cores idle;
    on busy cores it is slower."""
    weights: Literal["disk", "group"] = "disk"
    """How new weights reach the engines: as a folder that they load; or by broadcast over a process group of rank 0 and
    them (gloo, or NCCL between GPUs), bucket by bucket while gathering, with the folder written behind it."""
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
        if self.gpus is not None and len(self.gpus) != self.ranks:
            raise ValueError(f"gpus = {list(self.gpus)} names {len(self.gpus)} GPUs for ranks = {self.ranks}: one each")
        if self.minibatches > self.batch_groups:
            raise ValueError(f"minibatches = {self.minibatches} cuts {self.batch_groups} groups: at most one each")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps} is longer than the run, steps = {self.steps}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas} must be in [0, 1)")
        if self.lora is not None and (idle := {"trainable", "frozen"} & self.model_fields_set):
            raise ValueError(f"{', '.join(sorted(idle))} has no effect with lora: adapters are all that is trained")
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
    hand_over: bool = True
    """Whether each step's weights are written for engines; imitation has none."""
    commit: Literal["here", "conductor"] = "here"
    """Who makes a checkpoint whole: rank 0, once the feed has said that its incarnation still counts; or the conductor,
    which fetches every host's part: `checkpoints_dir` is then a folder of this host alone."""
    trace: bool = False
    """Whether each rank sends the advantage and the log-prob of every trained token to the feed, for inspection."""


def check_algorithm(options: AlgorithmOptions) -> None:
    """ValueError where the algorithm's module does not exist; imports only its parents."""
    module, _, name = options.path.partition(":")
    if not name.isidentifier() or importlib.util.find_spec(module) is None:
        raise ValueError(f"algorithm {options.name!r}: no module {module!r} with a class {name!r} can be imported")
