"""The rules, a function each: every one plays some episodes and notes what is wrong."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.check import state
from agentrl.check.actions import odd_actions, random_action, said
from agentrl.check.findings import Code, Findings
from agentrl.check.template import check_messages
from agentrl.check.transcript import Booth, Broken, Policy, Transcript, replay, told
from agentrl.check.watch import Belongings, belongings, report_growth
from agentrl.endpoint.template import ChatTemplate
from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.tool import Tool
from agentrl.types import Message, Row

Oracle = Callable[[Env, list[Message]], Message | str | None]
TURNS = 8
ORACLE_TURNS = 64
LEAK_EPISODES = 3
SETTLE_SECONDS = 5.0
"""How long closed things may take to go away. Not of the clock's time alone, of which a busy machine gives them little:
so many looks are taken that it would be as long on a free one."""
_LOOK_SECONDS = 0.02
_NEAR = 1e-6


@dataclass(slots=True)
class Case:
    """What is checked with: one row at a time."""

    env_class: type[Env]
    make: Callable[[Row], Env]
    row: Row
    seed: int
    booth: Booth
    findings: Findings
    template: ChatTemplate
    oracle: Oracle
    reward_range: tuple[float, float] | None

    def of(self, row: Row) -> None:
        """Go on with another row; every instance gets a copy of its own."""
        self.row = row
        self.booth.make = lambda: self.make(copy.deepcopy(row))

    def random(self, seed: int) -> Policy:
        """Random answers and calls; what is said depends on the seed, the turn and the tools alone."""
        return lambda env, messages, turn: random_action(random.Random(f"{seed} {turn}"), env.tools)


async def check_start(case: Case) -> Transcript:
    """One plain episode: the contract, the tools, the messages; the reference for everything later."""
    record = await case.booth.play(case.random(1), seed=case.seed, turns=TURNS)
    check_said(case, record)
    try:
        env = case.booth.open()
    except Broken:
        return record
    await case.booth.close(env)  # a run closes also what was never reset
    return record


def check_said(case: Case, record: Transcript) -> None:
    """The rules about the messages of one episode."""
    if not record.broken:
        check_messages(record, case.template, case.findings)
        check_history(record, case.findings)


def check_tools(tools: Sequence[Tool], findings: Findings) -> None:
    """Names, descriptions, and a type for each argument."""
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        findings.add(Code.TOOL_SCHEMA, f"two tools share a name: {names}")
    for tool in tools:
        function = tool.schema.get("function", {})
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", str(function.get("name"))):
            findings.add(Code.TOOL_SCHEMA, f"the name {function.get('name')!r} is not 1 to 64 letters, digits, _ or -")
        if not function.get("description"):
            findings.add(Code.TOOL_SCHEMA, f"tool {tool.name!r} has no description")
        parameters = function.get("parameters") or {}
        if parameters.get("type") != "object" or not isinstance(parameters.get("properties"), dict):
            findings.add(Code.TOOL_SCHEMA, f"the parameters of {tool.name!r} are no object with properties")
            continue
        for name, schema in parameters["properties"].items():
            if not {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"} & set(schema):
                findings.add(Code.TOOL_SCHEMA, f"argument {name!r} of {tool.name!r} has no type")
        try:
            json.dumps(tool.schema)
        except (TypeError, ValueError) as error:
            findings.add(Code.TOOL_SCHEMA, f"the schema of {tool.name!r} is no JSON: {error}")


def check_history(record: Transcript, findings: Findings) -> None:
    """A step's observation holds neither the action nor what was said before."""
    for turn, (action, observation) in enumerate(zip(record.actions, record.observations, strict=True), 1):
        begins_again = len(observation) > len(record.first) and observation[: len(record.first)] == record.first
        if any(message["role"] == "assistant" for message in observation) or begins_again:
            findings.add(Code.HISTORY, f"step {turn} returned {len(observation)} messages, old ones among them")
        calls = {str(call["id"]) for call in action.get("tool_calls") or []}
        answered = {str(message.get("tool_call_id")) for message in observation if message["role"] == "tool"}
        last = turn == len(record.actions) and record.ended
        if (calls - answered and not last) or answered - calls:
            findings.add(Code.TOOL_UNANSWERED, f"the calls {sorted(calls)} got answers to {sorted(answered)}")


async def check_determinism(case: Case, reference: Transcript) -> None:
    """The same seed and actions give the same episode: again, beside another one, and after it."""
    before, modules = state.class_state(case.env_class), state.module_state(case.env_class)
    drawn = state.global_random()
    again = [await case.booth.play(replay(reference.actions), seed=case.seed, turns=TURNS) for _ in range(2)]
    starts = [await case.booth.play(lambda *_: None, seed=case.seed, turns=0) for _ in range(4)]
    other = await case.booth.play(case.random(2), seed=case.seed + 1, turns=TURNS)
    drew = state.global_random() != drawn
    if any(record.broken for record in (*again, *starts, other)):
        return
    beside, held = await _side_by_side(case, reference)
    class_names = state.changed(before, state.class_state(case.env_class))
    module_names = state.changed(modules, state.module_state(case.env_class))
    differs = _difference(reference, again, starts)
    names = class_names + held + (module_names if differs or beside else [])
    seen = differs or beside
    if names:
        what = f"{', '.join(names[:4])} changed while episodes were played"
        case.findings.add(Code.SHARED_STATE, f"{what}; {seen}" if seen else what)
    if drew and seen:
        case.findings.add(Code.UNSEEDED, f"the process's global generator is used; {seen}")
    elif differs and not names:
        case.findings.add(Code.UNSEEDED, differs)
    elif beside and not names:
        case.findings.add(Code.SHARED_STATE, beside)


def _difference(reference: Transcript, again: Sequence[Transcript], starts: Sequence[Transcript]) -> str:
    for record in (*again, *starts):
        if record.start != reference.start:
            return f"with the same row and seed, reset gave {reference.start:.150} and {record.start:.150}"
    for record in again:
        for turn, (first, second) in enumerate(zip(reference.steps, record.steps, strict=False)):
            if first != second:
                return f"with the same seed and actions, step {turn + 1} gave {first:.150} and {second:.150}"
        if len(record.steps) != len(reference.steps):
            return f"with the same seed and actions, episodes took {len(reference.steps)} and {len(record.steps)} steps"
    return ""


async def _side_by_side(case: Case, reference: Transcript) -> tuple[str, list[str]]:
    """Two instances at once, one with the reference's actions and one with others; and what they hold in common."""
    booth, policy = case.booth, case.random(3)
    try:
        first, second = booth.open(), booth.open()
    except Broken:
        return "", []
    records = Transcript(), Transcript()
    booth.played += 2
    try:
        await booth.reset(first, case.seed, records[0])
        await booth.reset(second, case.seed, records[1])
        common = state.shared_objects(first, second)
        prints = {path: state.fingerprint(value) for path, value in common.items()}
        for turn, action in enumerate(reference.actions):
            if not records[1].ended and (other := policy(second, records[1].messages, turn)) is not None:
                await booth.step(second, other, records[1])
            await booth.step(first, action, records[0])
        held = [path for path, value in common.items() if state.fingerprint(value) != prints[path]]
    except Broken:
        broke = "" if Code.HANG in case.findings else "an episode broke while another one was played beside it"
        return broke, []
    finally:
        await booth.close(first)
        await booth.close(second)
    if records[1].start != reference.start:
        return "a second instance started differently while the first was open", held
    if records[0].text != reference.text:
        return "an episode went differently while another one was played beside it", held
    return "", held


async def check_again(case: Case, reference: Transcript) -> None:
    """One instance, reset again: with the same seed the same start; without one, reproducibly."""
    booth, env = case.booth, None
    firsts, plain = [], []
    try:
        for _ in range(2):
            env = booth.open()
            await booth.play(replay(reference.actions), seed=case.seed, turns=TURNS, env=env)
            again, later = Transcript(), Transcript()
            await booth.reset(env, case.seed, again)
            await booth.reset(env, None, later)
            firsts.append(again.start)
            plain.append(later.start)
            await booth.close(env)
    except Broken:
        case.findings.add(Code.RESET_AGAIN, "a second reset of the same instance failed")
        if env is not None:
            await booth.close(env)
        return
    if firsts[0] != reference.start and Code.UNSEEDED not in case.findings and Code.SHARED_STATE not in case.findings:
        case.findings.add(
            Code.RESET_AGAIN, f"reset gave {reference.start:.150}, and after an episode {firsts[0]:.150} with that seed"
        )
    if plain[0] != plain[1] and Code.UNSEEDED not in case.findings:
        case.findings.add(
            Code.PLAIN_RESET, f"reset(seed={case.seed}), then reset() gave {plain[0]:.100} and then {plain[1]:.100}"
        )


async def check_row(case: Case, reference: Transcript) -> None:
    """The row is as it was after an episode."""
    row = copy.deepcopy(case.row)
    known = state.fingerprint(row)
    keep = case.booth.make
    case.booth.make = lambda: case.make(row)
    try:
        await case.booth.play(replay(reference.actions), seed=case.seed, turns=TURNS)
    finally:
        case.booth.make = keep
    if state.fingerprint(row) != known:
        case.findings.add(Code.ROW_CHANGED, f"the row {case.row!r:.150} became {row!r:.150}")


async def check_after_end(case: Case, ended: Transcript) -> None:
    """A step after the end is refused, and does not start a new episode by itself."""
    env = case.booth.open()
    quiet, case.booth.findings = case.booth.findings, Findings()
    try:
        record = await case.booth.play(replay(ended.actions), seed=case.seed, turns=len(ended.actions), env=env)
        if not record.ended or record.broken:
            return
        try:
            result = await case.booth.callers[id(env)](env.step, said("once more"))
        except ContractError:
            return
        except Exception as error:
            case.findings.add(Code.STEP_AFTER_END, f"a step after the end raised {told(error)}, which names no remedy")
        else:
            case.findings.add(Code.STEP_AFTER_END, f"a step after the end gave {result!r:.200}")
    finally:
        case.booth.findings = quiet
        await case.booth.close(env)


async def check_odd(case: Case) -> None:
    """No answer whatsoever may raise."""
    tools: Sequence[Tool] = ()
    try:
        probe = case.booth.open()
        await case.booth.reset(probe, case.seed, Transcript())
        tools = probe.tools
        check_tools(tools, case.findings)
    except Broken:
        return
    quiet = case.booth.findings
    for name, action in odd_actions(tools):
        trial = Findings()
        case.booth.findings = trial
        actions = [action, said("1"), action]
        await case.booth.play(replay(actions), seed=case.seed, turns=3)
        for finding in trial.sorted():
            code = Code.ODD_INPUT if finding.code is Code.RAISES else finding.code
            quiet.add(code, f"{name}: {finding.seen}")
    case.booth.findings = quiet
    await case.booth.close(probe)


async def check_leaks(case: Case, reference: Transcript, folder: str) -> None:
    """Closed episodes leave nothing; the environments themselves are kept, so that nothing is freed by chance.

    `folder` is where temporary files go.
    """
    before = belongings(folder)
    kept = []
    for _ in range(LEAK_EPISODES):
        env = case.booth.open()
        kept.append(env)
        await case.booth.play(replay(reference.actions), seed=case.seed, turns=TURNS, env=env)
        await case.booth.close(env)
    after = await _settled(before, folder)
    report_growth(before, after, LEAK_EPISODES, case.findings)
    for task in after.tasks - before.tasks:
        task.cancel()
    kept.clear()


async def _settled(before: Belongings, folder: str) -> Belongings:
    """What is there once nothing more goes away by itself: callbacks of closed things may still be on their way."""
    gc.collect(1)  # what was just closed is young; the whole heap may be large
    now = belongings(folder)
    for _ in range(round(SETTLE_SECONDS / _LOOK_SECONDS)):
        if not any(_new(before, now)):
            break
        await asyncio.sleep(_LOOK_SECONDS)
        now = belongings(folder)
    return now


def _new(before: Belongings, now: Belongings) -> tuple[object, ...]:
    return (
        now.tasks - before.tasks,
        now.threads - before.threads,
        now.processes - before.processes,
        now.files - before.files,
        now.temporary - before.temporary,
    )
