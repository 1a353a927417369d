"""`agentrl check` and `agentrl play`: an environment by its path, before there is any run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from agentrl.check import check_env
from agentrl.conductor.check import resolve_env, rows_of
from agentrl.conductor.config import EnvSection
from agentrl.config import load
from agentrl.data import load_rows
from agentrl.errors import ConfigError
from agentrl.play import HELP, Player, play, summary
from agentrl.types import Row


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    env: EnvSection


def run_check(
    env: str, settings: Sequence[str], *, data: str | None, model: Path | None, seconds: float, seed: int, strict: bool
) -> bool:
    """Check and print; whether it passed."""
    section = _section(env, settings)
    env_class, _ = resolve_env(section)
    rows = load_rows(data, limit=64) if data else None
    report = check_env(env_class, rows, args=section.args, model=model, seconds=seconds, seed=seed)
    print(report)
    return report.ok and not (strict and report.findings)


def run_play(
    env: str,
    settings: Sequence[str],
    *,
    data: str | None,
    row: str,
    split: str,
    seed: int,
    oracle: bool,
    chance: bool,
    max_turns: int,
) -> None:
    """Play one episode in the terminal and say how it ended."""
    if oracle and chance:
        raise ConfigError("--oracle and --random exclude each other")
    env_class, make_env = resolve_env(_section(env, settings))
    if row.isdecimal():
        number = int(row)
        rows = rows_of(env_class, split, data, seed, number + 1)
        if number >= len(rows):
            raise ConfigError(f"--row {number}: there are {len(rows)} rows, from 0")
        chosen = rows[number]
    else:
        chosen = _written(row)
    player: Player = "oracle" if oracle else "random" if chance else "person"
    if player == "person":
        print(HELP)
    print(summary(asyncio.run(play(make_env, chosen, player, seed=seed, max_turns=max_turns, say=print, ask=input))))


def _section(env: str, settings: Sequence[str]) -> EnvSection:
    return load(_Settings, None, [f"env.path={json.dumps(env)}", *settings]).env


def _written(row: str) -> Row:
    try:
        found = json.loads(row)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--row {row!r} is neither a number nor JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--row {row!r} must be a number or a JSON object")
    return found
