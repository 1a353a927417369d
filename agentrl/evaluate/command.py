"""What `agentrl eval` and `agentrl rescore` do: resolve what the command names, play or score, print table and JSON."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from agentrl.conductor.check import resolve_agent, resolve_env, rows_of
from agentrl.conductor.config import AgentSection, EnvSection
from agentrl.config import load
from agentrl.env import Env
from agentrl.errors import ConfigError, RunError
from agentrl.evaluate.play import Bar, Line, Model, Plan, evaluate_api, rewards_of
from agentrl.evaluate.rescore import rescore
from agentrl.evaluate.saved import by_row, saved_sets
from agentrl.evaluate.stats import Summary, summarize
from agentrl.evaluate.table import as_json, show
from agentrl.types import Row


class Target(BaseModel):
    """Which environment and agent, with their arguments, and renames of the data's columns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: EnvSection
    agent: AgentSection = AgentSection()
    columns: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line of `agentrl eval`."""

    env: str
    model: Model
    agent: str = "agentrl.agent:Agent"
    settings: Sequence[str] = ()
    data: Sequence[str] = ()
    split: str = "test"
    rows: int = 50
    k: int = 1
    seed: int = 0
    concurrency: int = 16
    max_turns: int = 16
    time_limit: float = 600.0
    save: Path | None = None
    resume: bool = False
    passing: float = 1.0


def run_eval(asked: Asked) -> None:
    """Play and print; RunError where nothing at all was scored."""
    if asked.resume and asked.save is None:
        raise ConfigError("--resume has no effect without --save: there is nothing to go on with")
    target = load(Target, None, [f"env.path={asked.env!r}", f"agent.path={asked.agent!r}", *asked.settings])
    env_class, make_env = resolve_env(target.env)
    plan = Plan(
        make_env=make_env,
        make_agent=resolve_agent(target.agent),
        sets=_sets(asked, env_class, target.columns),
        k=asked.k,
        seed=asked.seed,
        concurrency=asked.concurrency,
        max_turns=asked.max_turns,
        time_limit=asked.time_limit,
        save=asked.save,
        resume=asked.resume,
        about=_about(asked, target),
    )
    with Bar(plan) as bar:
        lines = asyncio.run(evaluate_api(plan, asked.model, on_line=bar))
    show(_with_saved(asked, lines), Console())
    figures = as_json(lines, passing=asked.passing)
    print(json.dumps(figures))
    if figures["eval/reward"] is None:
        raise RunError(f"no episode was scored: {figures['eval/stops']}; {figures['eval/error']}")


def run_rescore(folder: Path, reward: str, *, out: Path | None, whole: bool, passing: float) -> None:
    """Score the saved episodes again, print both tables, and what changed as JSON."""
    if out is not None and out.resolve() == folder.resolve():
        raise ConfigError(f"--out {out} is the folder that is read: what the model said would be kept only once")
    found = asyncio.run(rescore(folder, _reward(reward), out=out, whole=whole))
    console = Console()
    sets = {}
    for name, rescored in found.items():
        sets[f"{name}, as saved"] = summarize(rewards_of(rescored.old), passing=passing)
        sets[f"{name}, rescored"] = summarize(rewards_of(rescored.new), passing=passing)
    show(sets, console)
    changed = {name: rescored.changed for name, rescored in found.items()}
    print(json.dumps({**as_json({n: r.new for n, r in found.items()}, passing=passing), "changed": changed}))


def _reward(given: str) -> str | dict[str, Any]:
    """A dotted path as it is; of a TOML file its table of parts, as in `env.args.rewards`."""
    if not given.endswith(".toml"):
        return given
    try:
        return tomllib.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--reward {given} cannot be read: {error}; it holds parts, `name = {{path = …}}`") from error


def _sets(asked: Asked, env_class: type[Env], columns: Mapping[str, str]) -> dict[str, list[Row]]:
    if not asked.data:
        return {env_class.__name__: rows_of(env_class, "eval", None, asked.seed, asked.rows)}
    sets: dict[str, list[Row]] = {}
    for given in asked.data:
        named = re.match(r"([A-Za-z0-9][\w.-]*)=(.+)", given)
        source = named[2] if named else given
        name = named[1] if named else re.sub(r"[^\w.-]+", "_", Path(source).stem).strip("_.-") or "data"
        if name in sets:
            raise ConfigError(f"two data sets are called {name!r}: name them, --data one={source} --data two=…")
        sets[name] = rows_of(env_class, "eval", source, asked.seed, asked.rows, split=asked.split, columns=columns)
    return sets


def _about(asked: Asked, target: Target) -> dict[str, Any]:
    """What must be the same where an evaluation goes on; rows, samples and limits of speed may differ."""
    return {
        "env": target.env.model_dump(mode="json"),
        "agent": target.agent.model_dump(mode="json"),
        "model": asked.model.name,
        "base_url": asked.model.base_url,
        "temperature": asked.model.temperature,
        "settings": dict(asked.model.settings),
        "seed": asked.seed,
        "max_turns": asked.max_turns,
    }


def _with_saved(asked: Asked, lines: Mapping[str, Sequence[Sequence[Line]]]) -> dict[str, Summary]:
    """This evaluation's data sets, and below them those that earlier ones saved in the same folder."""
    found = {name: summarize(rewards_of(rows), passing=asked.passing) for name, rows in lines.items()}
    if asked.save is not None:
        for name, _, episodes in saved_sets(asked.save):
            if name not in found:
                found[name] = summarize(rewards_of(by_row(episodes)), passing=asked.passing)
    return found
