"""A whole run's config: the rooms' options side by side, and what must hold between them.

Relative paths count from the directory in which `agentrl` was started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.cluster.options import ClusterOptions
from agentrl.endpoint.options import EndpointOptions
from agentrl.engine.options import EngineOptions
from agentrl.rollout.options import RolloutOptions
from agentrl.train.options import AlgorithmOptions, TrainOptions


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(_Section):
    """Which rows. What is not given comes from the environment's own `rows`."""

    train: str | None = None
    """A JSONL or Parquet file, `hub:name`, or `package.module:object` naming an iterable or a function of none."""
    eval: str | None = None
    """Held-out rows, in the same form."""
    train_limit: int | None = Field(None, ge=1)
    """Use the first so many training rows."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Renames of the data's columns: `question = "prompt"` makes the field `prompt` of the column `question`."""
    train_split: str = "train"
    """Of a hub data set."""
    eval_split: str = "test"
    """Of a hub data set."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.columns and self.train is None and self.eval is None:
            raise ValueError("columns has no effect: the rows are the environment's own, give train or eval")
        for key, source in (("train_split", self.train), ("eval_split", self.eval)):
            if key in self.model_fields_set and not (source or "").startswith("hub:"):
                raise ValueError(f"{key} has no effect: only a source 'hub:…' has splits")
        return self


class AgentSection(_Section):
    """Which agent."""

    path: str = "agentrl.agent:Agent"
    """`package.module:Class` or `path/to/file.py:Class`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, besides the tools."""


class EnvPart(_Section):
    """One environment of a mixture: a `[[env]]`."""

    path: str
    """`package.module:Class` or `path/to/file.py:Class`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, besides the row."""
    name: str = Field("", pattern=r"^[\w.-]*$")
    """For its metrics; the class's name where not given. Two of one class need names."""
    weight: float = Field(1.0, gt=0)
    """Its share of the episodes, against the others' weights."""
    data: DataSection = DataSection()
    """Its rows."""
    agent: AgentSection | None = None
    """Who plays it; the run's `[agent]` where not set."""

    @property
    def label(self) -> str:
        """What its groups are called."""
        return self.name or self.path.rpartition(":")[2]


class EnvSection(_Section):
    """Which environment. Several `[[env]]` instead of one `[env]` are a mixture."""

    path: str
    """`package.module:Class` or `path/to/file.py:Class`; of a mixture, those of its parts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, besides the row."""
    parts: tuple[EnvPart, ...] = ()
    """The environments of a mixture."""

    @model_validator(mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        paths = [part.get("path", "?") if isinstance(part, dict) else "?" for part in given]
        return {"path": " + ".join(map(str, paths)), "parts": given}

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        labels = [part.label for part in self.parts]
        if both := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two environments are called {both[0]!r}: give each [[env]] a name of its own")
        if self.parts and self.args:
            raise ValueError("args have no effect on a mixture: each [[env]] has its own")
        return self


class EvalSection(_Section):
    """Evaluation on held-out rows, beside the rollouts and without stopping them."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; one at step 0 and one after the last step come anyway. 0: no evaluation at all."""
    rows: int = Field(64, ge=1)
    """The first so many held-out rows."""
    samples: int = Field(1, ge=1)
    """Episodes a row."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    concurrency: int = Field(32, ge=1)
    """Evaluation episodes at once."""
    engine: Literal["shared", "own"] = "shared"
    """"shared": the rollouts' engines answer, beside rollouts; weights may change meanwhile, and `eval/versions` names
    all that answered. "own": one more engine server, with the settings of `[engine]`, holds exactly the weights of the
    step that is evaluated; rollouts do not notice."""
    gpus: tuple[int, ...] | None = None
    """The GPUs of that server."""


class MonitorSection(_Section):
    """What is shown and when a run counts as stalled."""

    stall_seconds: float = Field(900.0, gt=0)
    """Nothing has moved for so long: say who waits for what. After twice that the run ends."""
    trainer_restarts: int = Field(3, ge=0)
    """How often a trainer that died is started again from the last checkpoint, without a new checkpoint in between."""
    engine_restarts: int = Field(3, ge=0)
    """How often one engine may be started again within a minute before the run ends."""
    silent_seconds: float = Field(90.0, ge=10)
    """A trainer rank or an engine that has not answered for so long, though its process lives, is ended and started
    again. A paused engine answers."""
    keep_mb: int = Field(1024, ge=0)
    """MiB of finished episodes, with what training made of their tokens, that are kept for the page; the oldest go
    first. 0: none."""
    page: bool = True
    """Whether the run serves its page, from a process of its own."""
    page_host: str = "127.0.0.1"
    """Where it listens. Any other than a loopback address asks for the token that is in the URL it tells."""
    page_port: int = Field(0, ge=0, le=65535)
    """0: any free one."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where metrics go besides metrics.jsonl."""

    @model_validator(mode="after")
    def _page_settings_have_an_effect(self) -> Self:
        if not self.page and (idle := {"page_host", "page_port"} & self.model_fields_set):
            raise ValueError(f"{', '.join(sorted(idle))} has no effect with page = false")
        return self


class Common(_Section):
    """What both kinds of run have."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    """The run's folder is `run_dir/name`."""
    model: Path
    """A folder in Hugging Face form: config.json, weights, tokenizer.json, chat template."""
    seed: int = Field(0, ge=0)
    """Everything random follows from it."""
    run_dir: Path = Path("runs")
    """Where run folders are made."""
    train: TrainOptions = TrainOptions()
    monitor: MonitorSection = MonitorSection()


class RunConfig(Common):
    """`agentrl train`."""

    cluster: ClusterOptions = ClusterOptions()

    env: EnvSection
    agent: AgentSection = AgentSection()
    data: DataSection = DataSection()
    engine: EngineOptions = EngineOptions()
    endpoint: EndpointOptions = EndpointOptions()
    rollout: RolloutOptions = RolloutOptions()
    algorithm: AlgorithmOptions = AlgorithmOptions()
    eval: EvalSection = EvalSection()

    @model_validator(mode="before")
    @classmethod
    def _one_batch_size(cls, given: Any) -> Any:
        """`train.batch_groups` and `rollout.groups_per_step` are the same number; one of them is enough."""
        if not isinstance(given, dict):
            return given
        train, rollout = given.get("train", {}), given.get("rollout", {})
        if not (isinstance(train, dict) and isinstance(rollout, dict)):
            return given
        if "groups_per_step" in rollout and "batch_groups" not in train:
            train = {**train, "batch_groups": rollout["groups_per_step"]}
        elif "batch_groups" in train and "groups_per_step" not in rollout:
            rollout = {**rollout, "groups_per_step": train["batch_groups"]}
        return {**given, "train": train, "rollout": rollout}

    @model_validator(mode="before")
    @classmethod
    def _equal_groups_may_teach(cls, given: Any) -> Any:
        """Groups of equal rewards are filtered only where the algorithm learns from nothing but their differences."""
        if not isinstance(given, dict):
            return given
        algorithm, rollout = given.get("algorithm", {}), given.get("rollout", {})
        if not (isinstance(algorithm, dict) and isinstance(rollout, dict)) or "filter_equal" in rollout:
            return given
        try:
            contrasts = AlgorithmOptions.model_validate(algorithm).contrasts
        except ValidationError:
            return given  # reported with its place when the section is read
        own = ":" in str(algorithm.get("name", ""))
        return given if contrasts or own else {**given, "rollout": {**rollout, "filter_equal": False}}

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.train.batch_groups != self.rollout.groups_per_step:
            raise ValueError(
                f"train.batch_groups = {self.train.batch_groups} and rollout.groups_per_step = "
                f"{self.rollout.groups_per_step} are the same number by meaning: give one of them"
            )
        if self.env.parts and self.data.model_fields_set:
            raise ValueError("[data] has no effect with several [[env]]: each has its own, e.g. data = {train = …}")
        if self.env.parts and all(part.agent for part in self.env.parts) and self.agent.model_fields_set:
            raise ValueError("[agent] has no effect where each [[env]] has an agent of its own: remove it")
        if self.algorithm.name == "sft":
            raise ValueError("algorithm.name = 'sft' learns from conversations: start it with `agentrl sft`")
        if self.algorithm.baseline != "none" and ":" not in self.algorithm.name and self.rollout.samples == 1:
            raise ValueError(
                f"rollout.samples = 1 with the baseline {self.algorithm.baseline!r}: every advantage would be 0; "
                "raise samples, or set algorithm.baseline = 'none'"
            )
        if self.cluster.kind != "local":
            for section, options, names in (
                ("engine", self.engine, ("host", "port", "gpus")),
                ("train", self.train, ("gpus", "threads")),
            ):
                if idle := [name for name in names if name in options.model_fields_set]:
                    raise ValueError(
                        f"{section}.{idle[0]} has no effect with cluster.kind = {self.cluster.kind!r}: each worker "
                        "uses what its own host gives it"
                    )
            if self.train.weights == "group":
                raise ValueError(
                    f"train.weights = 'group' works on one machine, not with cluster.kind = {self.cluster.kind!r}: "
                    "there the weights travel as files from host to host"
                )
        self._check_own_engine()
        if self.eval.every == 0 and (extra := self.eval.model_fields_set - {"every"}):
            raise ValueError(f"eval.{', eval.'.join(sorted(extra))} has no effect with eval.every = 0")
        return self

    def _check_own_engine(self) -> None:
        own, given = self.eval.engine == "own", self.eval.gpus
        if given is not None and not (own and self.engine.kind == "sglang"):
            raise ValueError("eval.gpus has no effect without eval.engine = 'own' and engine.kind = 'sglang'")
        if own and self.cluster.kind != "local":
            raise ValueError(f"eval.engine = 'own' works on one machine, not with cluster.kind = {self.cluster.kind!r}")
        if own and self.engine.gpus is not None and len(given or ()) != self.engine.tensor_parallel:
            raise ValueError(
                f"eval.engine = 'own' beside engine.gpus needs {self.engine.tensor_parallel} GPUs of its own in "
                f"eval.gpus, got {list(given or ())}"
            )


class SftSection(_Section):
    """Conversations to imitate."""

    data: str
    """A JSONL file with `{"messages": […], "tools"?: […]}` a line, or `package.module:object`."""
    limit: int | None = Field(None, ge=1)
    """Use the first so many conversations."""
    eval_share: float = Field(0.02, ge=0, lt=1)
    """The share held out for the evaluation loss."""
    eval_every: int = Field(50, ge=1)
    """Steps between evaluations; there is one before the first step and one after the last too."""


class SftConfig(Common):
    """`agentrl sft`: stage one. `train.batch_groups` is the number of conversations a step."""

    sft: SftSection
    algorithm: AlgorithmOptions = AlgorithmOptions(name="sft")
    cluster: ClusterOptions = ClusterOptions()
    """Where the trainer's ranks run: here, or on workers that register (`kind = "external"`)."""

    @model_validator(mode="before")
    @classmethod
    def _name_goes_without_saying(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("algorithm"), dict):
            return {**given, "algorithm": {"name": "sft", **given["algorithm"]}}
        return given

    @model_validator(mode="after")
    def _is_sft(self) -> Self:
        if self.algorithm.name != "sft":
            raise ValueError(f"algorithm.name = {self.algorithm.name!r} needs rollouts: start it with `agentrl train`")
        if "weights" in self.train.model_fields_set:
            raise ValueError("train.weights has no effect: no engine takes part in imitation, remove it")
        if idle := self.cluster.model_fields_set & {"rollout_workers", "slow_seconds", "fanout"}:
            raise ValueError(f"cluster.{min(idle)} has no effect: imitation has no engines and no rollouts, remove it")
        if self.cluster.kind == "ray":
            raise ValueError("cluster.kind = 'ray' places the workers of `agentrl train` alone: set 'external' here")
        if self.cluster.kind != "local" and "gpus" in self.train.model_fields_set:
            raise ValueError(
                f"train.gpus has no effect with cluster.kind = {self.cluster.kind!r}: workers use their own"
            )
        if self.sft.eval_share == 0 and "eval_every" in self.sft.model_fields_set:
            raise ValueError("sft.eval_every has no effect with sft.eval_share = 0")
        if "keep_mb" in self.monitor.model_fields_set:
            raise ValueError("monitor.keep_mb has no effect: without rollouts there are no episodes to keep")
        return self
