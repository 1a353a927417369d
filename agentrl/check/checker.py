"""`check_env`: plays an environment without a model and says what is wrong with it, before any GPU is rented."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.check.findings import Code, Cost, Findings, Report
from agentrl.check.rewards import check_rewards, judge_ends, measure
from agentrl.check.rules import (
    Case,
    Oracle,
    check_after_end,
    check_again,
    check_determinism,
    check_leaks,
    check_odd,
    check_row,
    check_start,
)
from agentrl.check.template import shipped_template
from agentrl.check.transcript import Booth, Broken, Transcript, replay
from agentrl.check.watch import Watch, belongings, end_processes, temporary_folder
from agentrl.endpoint.template import ChatTemplate
from agentrl.env import Env
from agentrl.errors import AgentRLError, ContractError, DataError
from agentrl.types import Row

ROWS = 3
_COMPARED = 16


def check_env(
    env_class: type[Env],
    rows: Iterable[Row] | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    reward_range: tuple[float, float] | None = None,
    oracle: Oracle | None = None,
    model: Path | None = None,
    seconds: float = 60.0,
    seed: int = 7,
) -> Report:
    """Play `env_class` with scripted answers and report every rule that it breaks.

    ```python
    report = check_env(GuessNumber, reward_range=(0.0, 1.0))
    assert not report.findings, report
    ```

    `rows`: the first three are played; the environment's own where not given. `args` are `[env.args]`. `reward_range`
    and `oracle` are by default the environment's. `model` is a folder whose chat template the messages must survive
    (the tiny test model's otherwise). `seconds` is the deadline of each call. Works with and without a running event
    loop; it blocks until it is done. Raises ContractError or DataError where there is nothing that could be played, and
    InfrastructureError where a sandbox or server that the environment needs is not there.
    """
    if not (isinstance(env_class, type) and issubclass(env_class, Env)):
        raise ContractError(f"{env_class!r} is not a subclass of agentrl's Env")
    findings = Findings()
    played = list(itertools.islice(rows, ROWS)) if rows is not None else _own_rows(env_class, seed, findings)
    if not played:
        raise DataError(f"{env_class.__name__}: there are no rows to play")
    _check_json(played, findings)
    given = dict(args or {})
    booth = Booth(lambda: env_class(played[0], **given), findings, Watch(findings), seconds)
    case = Case(
        env_class,
        lambda row: env_class(row, **given),
        played[0],
        seed,
        booth,
        findings,
        ChatTemplate.load(model) if model else shipped_template(),
        oracle or (lambda env, messages: env.oracle(messages)),
        reward_range,
    )
    with temporary_folder() as folder:
        cost = _run(_check(case, played, folder))
    return Report(env_class.__name__, findings.sorted(), booth.played, cost)


async def _check(case: Case, rows: Sequence[Row], folder: str) -> Cost | None:
    at_start = belongings(folder)
    try:
        return await _rules(case, rows, folder)
    finally:
        if Code.LEAKED_PROCESS in case.findings:
            end_processes(belongings(folder).processes - at_start.processes)


async def _rules(case: Case, rows: Sequence[Row], folder: str) -> Cost | None:
    case.of(rows[0])
    if case.reward_range is None:
        case.reward_range = _range_of(case)
    try:
        keeper = case.booth.open()
    except Broken:
        return None
    try:
        # Open to the end, so that what all instances share (sandboxes, servers) is not made anew for each of them.
        # Reset and not played, so that it holds as little of that as can be.
        await case.booth.play(replay([]), seed=case.seed, turns=0, env=keeper)
        first = await check_start(case)
        if first.broken:
            return None  # every other rule would only repeat it
        plays = await _play_rows(case, rows, first)
        ended = judge_ends(case, [play for _, play in plays])
        await check_again(case, first)
        await check_row(case, first)
        for row in [row for row, play in plays if play is ended]:
            case.of(row)
            await check_after_end(case, ended or first)
        case.of(rows[0])
        await check_odd(case)
        await check_leaks(case, first, folder)
        return await measure(case, first)
    finally:
        await case.booth.close(keeper)


async def _play_rows(case: Case, rows: Sequence[Row], first: Transcript) -> list[tuple[Row, Transcript]]:
    plays: list[tuple[Row, Transcript]] = []
    for number, row in enumerate(rows):
        case.of(row)
        reference = first if number == 0 else await check_start(case)
        if reference.broken:
            continue
        await check_determinism(case, reference)
        plays += [(row, play) for play in await check_rewards(case, reference)]
    case.of(rows[0])
    return plays


def _range_of(case: Case) -> tuple[float, float] | None:
    try:
        return case.booth.make().reward_range
    except Exception:
        return None  # the first play tells what is wrong


def _own_rows(env_class: type[Env], seed: int, findings: Findings) -> list[Row]:
    made = [list(itertools.islice(_rows(env_class, split, seed), _COMPARED)) for split in ("train", "train", "eval")]
    if made[0] != made[1]:
        findings.add(Code.ROWS, f"rows('train', {seed}) gave {made[0][:1]!r:.150} and then {made[1][:1]!r:.150}")
    both = [row for row in made[0] if row in made[2]]
    if both:
        findings.add(Code.ROWS_OVERLAP, f"{both[0]!r:.150} is in both splits")
    return made[0][:ROWS]


def _rows(env_class: type[Env], split: str, seed: int) -> Iterable[Row]:
    try:
        return env_class.rows(split, seed)
    except AgentRLError:
        raise
    except Exception as error:
        # The user's code: whatever it raises is a fault of the input.
        raise DataError(
            f"{env_class.__name__}.rows({split!r}, {seed}) raised {type(error).__name__}: {error}"
        ) from error


def _check_json(rows: Sequence[Row], findings: Findings) -> None:
    for row in rows:
        try:
            json.dumps(dict(row))
        except (TypeError, ValueError) as error:
            findings.add(Code.NOT_JSON, f"the row {row!r:.150}: {error}")


def _run(work: Any) -> Cost | None:
    """In an event loop of its own, in a thread of its own: the caller may be in a loop, and the check watches one."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="agentrl-check", daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    cost: Cost | None = outcome[0]
    return cost
