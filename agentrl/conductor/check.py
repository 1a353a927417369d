"""Everything that can be known to be wrong is said before any process starts."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.agent import Agent
from agentrl.calling import call
from agentrl.conductor.config import (
    AgentSection,
    Common,
    DataSection,
    EnvPart,
    EnvSection,
    RunConfig,
    SftConfig,
)
from agentrl.conductor.conversations import Conversation, Render, parse_conversation, renderer_of, split
from agentrl.conductor.folder import folder_bytes
from agentrl.conductor.knobs import refuse_dead_knobs
from agentrl.conductor.machine import gpu_count
from agentrl.conductor.page import check_monitor
from agentrl.config import resolve_object
from agentrl.contract import checked_reset
from agentrl.data import MIXED, env_of, load_rows, mix_rows, take_rows
from agentrl.endpoint.render import Renderer
from agentrl.endpoint.template import ChatTemplate
from agentrl.env import Env
from agentrl.errors import AgentRLError, ConfigError, DataError
from agentrl.rollout.group import group_reward_of
from agentrl.rollout.session import AgentByRow, MakeAgent, MakeOneAgent, agent_of
from agentrl.tool import Tool
from agentrl.types import Row

FIRST_RESET_SECONDS = 120.0


class RunPlan(NamedTuple):
    """What `[env]`, `[agent]` and `[data]` mean."""

    env: str
    make_env: Callable[[Row], Env]
    make_agent: MakeAgent
    train_rows: list[Row]
    eval_rows: list[Row]
    model_bytes: int


class SftPlan(NamedTuple):
    """The conversations, split."""

    render: Render
    train: list[Conversation]
    held_out: list[Conversation]
    model_bytes: int


def check_run(config: RunConfig, *, model_needed: bool = True) -> RunPlan:
    """Check an `agentrl train` config against the world; ConfigError says what to mend.

    Without `model_needed` the run may be meant for another machine, which has the model and the GPUs: what depends on
    them is left out where they are not here.
    """
    refuse_dead_knobs(config, gpus=gpu_count() if model_needed and config.cluster.kind == "local" else None)
    template, model_bytes = check_common(config) if model_needed or config.model.exists() else (None, 0)
    check_ports(config)
    plan = plan_run(config, model_bytes)
    for rows, share in ((plan.train_rows, "training"), (plan.eval_rows, "held-out")):
        first = {env_of(row, plan.env): row for row in reversed(rows)}
        for name, row in first.items():
            which = f"the first {share} row" + (f" of {name}" if len(first) > 1 else "")
            asyncio.run(try_row(plan.make_env, plan.make_agent, row, which, template, config))
    return plan


def check_ports(config: RunConfig) -> None:
    """ConfigError where a port that the config names is taken, or a tracker is not installed."""
    check_monitor(config.monitor)
    _check_port(config.endpoint.host, config.endpoint.port, "endpoint.port")
    if config.engine.port is not None:
        for index in range(config.engine.count):
            _check_port(config.engine.host, config.engine.port + index, "engine.port")


def plan_run(config: RunConfig, model_bytes: int) -> RunPlan:
    """Find environment, agent and rows; nothing is played yet."""
    group_reward_of(config.rollout)
    env_class, make_env = resolve_env(config.env)
    make_agent = resolve_agents(config)
    if not config.env.parts:
        train_rows, eval_rows = _rows(env_class, config.data, config)
        return RunPlan(env_class.__name__, make_env, make_agent, train_rows, eval_rows, model_bytes)
    found = {part.label: _rows(_part(part)[0], part.data, config) for part in config.env.parts}
    weights = {part.label: part.weight for part in config.env.parts}
    train_rows = mix_rows({name: train for name, (train, _) in found.items()}, weights)
    # Of each its own number of held-out rows, once each: shares are for training.
    eval_rows = [{**row, MIXED: name} for name, (_, held_out) in found.items() for row in held_out]
    return RunPlan("mixture", make_env, make_agent, train_rows, eval_rows, model_bytes)


def _rows(env_class: type[Env], data: DataSection, config: RunConfig) -> tuple[list[Row], list[Row]]:
    columns, seed = data.columns, config.seed
    train = rows_of(env_class, "train", data.train, seed, data.train_limit, split=data.train_split, columns=columns)
    if not config.eval.every:
        return train, []
    rows = config.eval.rows
    return train, rows_of(env_class, "eval", data.eval, seed, rows, split=data.eval_split, columns=columns)


def resolve_env(section: EnvSection) -> tuple[type[Env], Callable[[Row], Env]]:
    """The environment's class, and how one is made from a row; ConfigError where path or arguments do not fit.

    Of a mixture: `Env`, and how the one that a row is for is made.
    """
    if section.parts:
        makers = {part.label: _part(part)[1] for part in section.parts}

        def choose(row: Row) -> Env:
            plain = {name: value for name, value in row.items() if name != MIXED}
            return makers[row[MIXED]](plain)

        return Env, choose
    found = _subclass(section.path, Env, "env.path")
    _check_arguments(found, section.args, "env.args")

    def make(row: Row) -> Env:
        made: Env = found(row, **section.args)
        return made

    return found, make


def _part(part: EnvPart) -> tuple[type[Env], Callable[[Row], Env]]:
    return resolve_env(EnvSection(path=part.path, args=part.args))


def resolve_agents(config: RunConfig) -> MakeAgent:
    """How agents are made: `[agent]`, or for the rows of a mixture's part that has one, its own."""
    common = resolve_agent(config.agent)
    own = {part.label: resolve_agent(part.agent) for part in config.env.parts if part.agent is not None}
    return AgentByRow(lambda row: own.get(env_of(row, ""), common)) if own else common


def resolve_agent(section: AgentSection) -> MakeOneAgent:
    """How an agent is made from an environment's tools."""
    found = _subclass(section.path, Agent, "agent.path")
    _check_arguments(found, section.args, "agent.args")

    def make(tools: Sequence[Tool]) -> Agent:
        made: Agent = found(tools, **section.args)
        return made

    return make


def check_sft(config: SftConfig) -> SftPlan:
    """Check an `agentrl sft` config against the world."""
    refuse_dead_knobs(config, gpus=gpu_count())
    template, model_bytes = check_common(config)
    rows = load_rows(config.sft.data, limit=config.sft.limit, needed=("messages",))
    conversations = [parse_conversation(row, number) for number, row in enumerate(rows)]
    train, held_out = split(conversations, config.sft.eval_share, config.seed)
    renderer = Renderer(template)
    renderer.require_proof()
    render = renderer_of(renderer)
    render(train[0])
    return SftPlan(render, train, held_out, model_bytes)


def check_common(config: Common) -> tuple[ChatTemplate, int]:
    """The model folder is whole and the trainer's packages are there; its template and the size of its weights."""
    model = config.model
    if not model.is_dir():
        raise ConfigError(
            f"model = {str(model)!r}: there is no such folder; give a local Hugging Face folder "
            "(a hub name must be downloaded first: hf download NAME --local-dir FOLDER)"
        )
    if not (model / "config.json").is_file():
        raise ConfigError(f"model = {str(model)!r} has no config.json: it is not a Hugging Face model folder")
    model_bytes = folder_bytes(model, "*.safetensors") or folder_bytes(model, "*.bin")
    if not model_bytes:
        raise ConfigError(f"model = {str(model)!r} holds no weights: there is no *.safetensors file in it")
    for package in ("torch", "transformers", "deepspeed"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the trainer needs {package}: pip install 'agentrl[train]'")
    return ChatTemplate.load(model), model_bytes


def _subclass(path: str, base: type, key: str) -> type[Any]:
    try:
        found = resolve_object(path)
    except ConfigError as error:
        raise ConfigError(f"{key} = {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{key} = {path!r} is {found!r}, not a subclass of agentrl's {base.__name__}")
    return found


def _check_arguments(cls: type, args: dict[str, Any], key: str) -> None:
    try:
        inspect.signature(cls).bind(None, **args)
    except TypeError as error:
        raise ConfigError(f"{key} does not fit {cls.__name__}{inspect.signature(cls)}: {error}") from error


def rows_of(
    env_class: type[Env],
    share: str,
    source: str | None,
    seed: int,
    limit: int | None,
    *,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
) -> list[Row]:
    """The rows of `source`, or the environment's own where that is None."""
    if source is not None:
        return load_rows(source, limit=limit, split=split, columns=columns)
    name = f"{env_class.__name__}.rows({share!r})"
    try:
        return take_rows(env_class.rows(share, seed), name, limit)
    except AgentRLError as error:
        raise ConfigError(f"data.{share} is not set, and {error}") from error
    except Exception as error:
        # The user's code: whatever it raises is a fault of the input.
        raise DataError(f"{name} raised {type(error).__name__}: {error}") from error


async def try_row(
    make_env: Callable[[Row], Env],
    make_agent: MakeAgent,
    row: Row,
    which: str,
    template: ChatTemplate | None,
    config: RunConfig,
) -> int:
    """Start an episode of `row` and end it; the tokens of its first messages, 0 without a template.

    ConfigError says what failed, with `which` row.
    """
    env: Env | None = None
    doing = f"making {config.env.path}"
    try:
        env = make_env(row)
        doing = f"{config.env.path}.reset"
        async with asyncio.timeout(FIRST_RESET_SECONDS):
            messages, _ = checked_reset(await call(env.reset, seed=config.seed))
        own = {part.label: part.agent for part in config.env.parts}.get(env_of(row, ""))
        doing = f"making {(own or config.agent).path}"
        agent_of(make_agent, row)(env.tools)
        schemas = [tool.schema for tool in env.tools]
        tokens = template.encode(messages, schemas, generation=True) if template else ()
        doing = f"{config.env.path}.close"
        await call(env.close)
    except TimeoutError as error:
        raise ConfigError(f"{doing} with {which} took more than {FIRST_RESET_SECONDS:.0f} s") from error
    except AgentRLError as error:
        raise ConfigError(f"{doing} with {which}: {error}") from error
    except Exception as error:
        # The user's code: whatever it raises is a fault of the input. A KeyError is mostly a row without a field.
        kind = DataError if isinstance(error, KeyError) else ConfigError
        raise kind(
            f"{doing} with {which} raised {type(error).__name__}: {error}; the row has the fields {', '.join(row)}"
        ) from error
    if template is None:
        return 0
    limits = (template.context_length, config.engine.context_length, config.endpoint.context_length)
    longest = min((limit for limit in limits if limit), default=1 << 30)
    if len(tokens) >= longest:
        raise ConfigError(
            f"the first messages of {which} are {len(tokens)} tokens long and the context has {longest}: "
            "raise engine.context_length, or take a model with a longer one"
        )
    return len(tokens)


def _check_port(host: str, port: int, key: str) -> None:
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{key} = {port}: {error.strerror} on {host}; choose another one, or 0 for any free one"
            ) from error
