"""`agentrl rescore`: the saved episodes of an evaluation under another reward, without asking the model again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.errors import ContractError
from agentrl.evaluate.play import Line
from agentrl.evaluate.saved import Key, by_row, saved_sets, write_sets
from agentrl.reward.compose import Composed, shared
from agentrl.reward.score import Score
from agentrl.types import Stop


class Rescored(NamedTuple):
    """A data set's episodes by row, under the old reward and the new; `changed` counts those whose reward differs."""

    old: list[list[Line]]
    new: list[list[Line]]
    changed: int


async def rescore(
    folder: Path,
    reward: str | Mapping[str, Any],
    *,
    out: Path | None = None,
    whole: bool = False,
    concurrency: int = 16,
) -> dict[str, Rescored]:
    """Score every saved episode again. `reward` is a dotted path or a table of parts (docs/rewards.md).

    The function gets the last answer and the row; with `whole` all messages and the row. Episodes that failed for
    another reason than the model stay as they are. `out` gets the folder's files with the new rewards.
    """
    composed = shared({"reward": {"path": reward}} if isinstance(reward, str) else reward)
    found = {}
    for name, settings, episodes in saved_sets(folder):
        found[name] = await _rescore(composed, episodes, whole, concurrency)
        if out is not None:
            lines = [line for row in found[name].new for line in row]
            await asyncio.to_thread(write_sets, out, name, {**settings, "rescored": reward}, lines)
    return found


async def _rescore(reward: Composed, episodes: Mapping[Key, Line], whole: bool, concurrency: int) -> Rescored:
    room = asyncio.Semaphore(concurrency)

    async def one(line: Line) -> Line:
        stop = Stop(line["stop"])
        said = any(message["role"] == "assistant" for message in line["messages"])
        if not said or not (stop.scored or stop is Stop.NO_VERDICT):
            return line  # nothing that the model could be scored for
        async with room:
            found = await _score(reward, line, whole)
        turns = [{**turn, "reward": 0.0, "parts": {}} for turn in line["turns"]] or [{"agent": ""}]
        turns[-1] = {**turns[-1], "reward": found.value, "parts": dict(found.parts)}
        if found.value is None:
            stop = Stop.NO_VERDICT
        elif stop is Stop.NO_VERDICT:
            stop = Stop.FINISHED
        return {**line, "stop": stop.value, "reward": found.value, "turns": turns}

    keys = sorted(episodes)
    lines = await asyncio.gather(*(one(episodes[key]) for key in keys))
    new = dict(zip(keys, lines, strict=True))
    changed = sum(new[key]["reward"] != episodes[key]["reward"] for key in keys)
    return Rescored(by_row(episodes), by_row(new), changed)


async def _score(reward: Composed, line: Line, whole: bool) -> Score:
    messages: Sequence[Mapping[str, Any]] = line["messages"]
    said: Any = messages if whole else _last_answer(messages)
    try:
        return await reward(said, line["row"])
    except ContractError:
        raise
    except Exception as error:  # the user's function, of which one bad row must be told with its place
        raise ContractError(f"the reward raised {type(error).__name__}: {error}; on the row {line['row']}") from error


def _last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    answers = [message for message in messages if message["role"] == "assistant"]
    return str(answers[-1].get("content") or "")
