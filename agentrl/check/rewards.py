"""The rules about how episodes end, what they earn and what they cost."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from agentrl.check.actions import said
from agentrl.check.findings import Code, Cost
from agentrl.check.rules import ORACLE_TURNS, TURNS, Case, check_said
from agentrl.check.transcript import Policy, Transcript, replay
from agentrl.env import Env
from agentrl.types import Message

SLOW_SECONDS = 0.5
"""Of the event loop's CPU for one step. Not of the clock's time, which other programs on the machine stretch."""
_NEAR = 1e-6


async def check_rewards(case: Case, reference: Transcript) -> list[Transcript]:
    """Play as the oracle, with empty answers, with the same answer always, and at random; compare what they earned."""
    booth = case.booth
    best = await booth.play(_oracle(case), seed=case.seed, turns=ORACLE_TURNS)
    empty = await booth.play(lambda *_: said(""), seed=case.seed, turns=ORACLE_TURNS)
    plays = [reference, empty, await booth.play(lambda *_: said("1"), seed=case.seed, turns=ORACLE_TURNS)]
    plays += [await booth.play(case.random(seed), seed=case.seed, turns=TURNS) for seed in (4, 5, 6)]
    if best.actions and not best.broken:
        _judge_oracle(case, best, empty, plays)
        plays.append(best)
    elif case.reward_range is not None and empty.ended and (empty.total or 0.0) >= case.reward_range[1] - _NEAR:
        case.findings.add(Code.EMPTY_PAYS, f"empty answers earn {empty.total}, the most of reward_range")
    for play in plays:
        check_said(case, play)
        _judge_range(case, play)
        if play.truncated and not play.limited and (play.total or 0.0) > 0:
            case.findings.add(
                Code.SWAPPED_FLAGS, f"an episode was truncated by an action that earned {play.rewards[-1]}"
            )
    return [play for play in plays if not play.broken]


def _oracle(case: Case) -> Policy:
    def act(env: Env, messages: list[Message], turn: int) -> Message | None:
        answer = case.oracle(env, messages)
        return said(answer) if isinstance(answer, str) else answer

    return act


def _judge_oracle(case: Case, best: Transcript, empty: Transcript, plays: Sequence[Transcript]) -> None:
    if not best.ended:
        case.findings.add(Code.ORACLE, f"the oracle did not end the episode within {len(best.actions)} turns")
        return
    if best.truncated and not best.limited:
        case.findings.add(Code.SWAPPED_FLAGS, "the oracle solved the task, and the episode said truncated")
    if best.total is None:
        case.findings.add(Code.ORACLE, "the oracle got no verdict")
        return
    if case.reward_range is not None and best.total < case.reward_range[1] - _NEAR:
        case.findings.add(
            Code.ORACLE, f"the oracle earned {best.total}, and reward_range ends at {case.reward_range[1]}"
        )
    if empty.ended and empty.total is not None and empty.total >= best.total - _NEAR:
        case.findings.add(Code.EMPTY_PAYS, f"empty answers earned {empty.total}, the oracle {best.total}")
    for play in plays:
        if play is not empty and play.ended and play.total is not None and play.total > best.total + _NEAR:
            case.findings.add(Code.ORACLE, f"the oracle earned {best.total}, and random answers {play.total}")


def _judge_range(case: Case, play: Transcript) -> None:
    if case.reward_range is None or play.total is None or not play.ended:
        return
    low, high = case.reward_range
    if not low - _NEAR <= play.total <= high + _NEAR:
        case.findings.add(Code.REWARD_RANGE, f"an episode earned {play.total}, outside {case.reward_range}")


def judge_ends(case: Case, plays: Sequence[Transcript]) -> Transcript | None:
    """The rules over all plays; one that ended, if any did."""
    ended = [play for play in plays if play.ended]
    if ended and all(play.total is None for play in ended):
        case.findings.add(Code.NO_VERDICT, f"none of {len(ended)} episodes that ended had a reward")
    cut = [play for play in ended if play.truncated and not play.limited]
    # A limit of the environment's own cuts every episode at the same turn, and not at the first.
    lengths = {len(play.steps) for play in cut}
    if any(play.terminated for play in ended):
        pass
    elif cut and (1 in lengths or len(lengths) > 1):
        case.findings.add(Code.SWAPPED_FLAGS, f"{len(cut)} episodes ended, all truncated and none terminated")
    else:
        case.findings.add(Code.NEVER_TERMINATED, f"none of {len(plays)} episodes ended with terminated")
    return max(ended, key=lambda play: play.terminated, default=None)


async def measure(case: Case, reference: Transcript) -> Cost | None:
    """What reset and step cost, each call as in the cheapest of three plays."""
    booth = case.booth
    booth.watch.active = False
    plays = []
    for _ in range(3):
        booth.times.clear()
        await booth.play(replay(reference.actions), seed=case.seed, turns=TURNS)
        plays.append(list(booth.times))
    booth.watch.active = True
    if not plays[0] or any(len(times) != len(plays[0]) for times in plays):
        return None
    least = [min(calls, key=lambda times: times.cpu) for calls in zip(*plays, strict=True)]
    resets = [times for times in least if times.name == "reset"]
    steps = [times for times in least if times.name == "step"] or resets
    slowest = min(
        max(times.loop_cpu for times in play if times.name == "step") if len(play) > 1 else 0.0 for play in plays
    )
    if slowest > SLOW_SECONDS and inspect.iscoroutinefunction(case.env_class.step):
        case.findings.add(Code.SLOW, f"a step took {slowest:.2f} s of the event loop's CPU")
    return Cost(
        1000 * sum(t.clock for t in resets) / len(resets),
        1000 * sum(t.cpu for t in resets) / len(resets),
        1000 * sum(t.clock for t in steps) / len(steps),
        1000 * sum(t.cpu for t in steps) / len(steps),
    )
