"""One episode, played by a plain function instead of a model, and everything the environment said on the way."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl.calling import Caller
from agentrl.check.findings import Code, Findings
from agentrl.check.watch import Watch
from agentrl.contract import checked_parts, checked_reset, checked_step
from agentrl.env import Env
from agentrl.errors import ContractError, InfrastructureError
from agentrl.types import Message, Step

Policy = Callable[[Env, list[Message], int], Message | None]
"""From the environment, the conversation so far and the turn to an action; None gives up."""


class Broken(Exception):
    """The episode cannot go on; its finding is noted."""


class Times(NamedTuple):
    """Seconds of one call: on the clock, of the process's CPU, and of the event loop's."""

    name: str
    clock: float
    cpu: float
    loop_cpu: float


@dataclass(slots=True)
class Transcript:
    """What was said. `start` and `steps` are comparable texts; `rewards` are those of the steps."""

    start: str = ""
    steps: list[str] = field(default_factory=list)
    first: list[Message] = field(default_factory=list)
    observations: list[list[Message]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    actions: list[Message] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    limited: bool = False
    """Truncated by a wrapper that says so."""
    broken: bool = False

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    @property
    def total(self) -> float | None:
        """What the episode earned; None without a verdict."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) if self.rewards and len(known) == len(self.rewards) else None

    @property
    def text(self) -> str:
        return "\n".join((self.start, *self.steps))


@dataclass(slots=True)
class Booth:
    """Makes environments and calls them, each call watched and with a deadline."""

    make: Callable[[], Env]
    findings: Findings
    watch: Watch
    seconds: float
    played: int = 0
    times: list[Times] = field(default_factory=list)
    callers: dict[int, Caller] = field(default_factory=dict)

    def open(self) -> Env:
        """A fresh environment."""
        try:
            env = self.make()
        except Exception as error:
            self.findings.add(Code.RAISES, f"making the environment raised {told(error)}")
            raise Broken from error
        self.callers[id(env)] = Caller()
        return env

    async def reset(self, env: Env, seed: int | None, record: Transcript) -> None:
        """Start an episode and note its first messages."""
        result = await self._call(env, env.reset, "reset", {"seed": seed})
        with self._contract():
            messages, _ = checked_reset(result, content=False)  # the template's own rule says more
        record.start = comparable(messages, self.findings, "reset")
        record.first = record.messages = messages

    async def step(self, env: Env, action: Message, record: Transcript) -> Step:
        """One step, noted."""
        given = copy.deepcopy(action)
        result = await self._call(env, env.step, "step", {}, given)
        with self._contract():
            step = checked_step(result, content=False)
            checked_parts(step.info)
        verdict = f"{step.reward} {step.terminated} {step.truncated}"
        record.steps.append(comparable(step.observation, self.findings, "step") + verdict)
        record.actions.append(action)
        record.observations.append(step.observation)
        record.rewards.append(step.reward)
        record.terminated, record.truncated = step.terminated, step.truncated
        record.limited = "truncated_by" in step.info
        record.messages = [*record.messages, action, *step.observation]
        if step.terminated and step.truncated:
            self.findings.add(Code.BOTH_FLAGS, f"step {len(record.steps)} said terminated and truncated")
        return step

    async def close(self, env: Env) -> None:
        """Close it; what that raises is a finding and no more."""
        caller = self.callers.pop(id(env), None) or Caller()
        try:
            async with asyncio.timeout(self.seconds):
                await caller(env.close)
        except TimeoutError:
            self.findings.add(Code.HANG, f"close did not return within {self.seconds:g} s")
        except Exception as error:
            self.findings.add(Code.CLOSE, f"close raised {told(error)}")
        finally:
            caller.end()

    async def play(self, policy: Policy, *, seed: int, turns: int, env: Env | None = None) -> Transcript:
        """An episode from reset to its end, or to `turns`; closed, unless it was given."""
        record = Transcript()
        own = env is None
        self.played += 1
        try:
            env = env or self.open()
        except Broken:
            record.broken = True
            return record
        try:
            await self.reset(env, seed, record)
            while len(record.steps) < turns and not record.ended:
                action = policy(env, copy.deepcopy(record.messages), len(record.steps))
                if action is None:
                    break
                await self.step(env, action, record)
        except Broken:
            record.broken = True
        finally:
            if own:
                await self.close(env)
        return record

    async def _call(self, env: Env, function: Any, name: str, settings: dict[str, Any], *given: Any) -> Any:
        begin = (time.perf_counter(), time.process_time(), time.thread_time())
        try:
            async with asyncio.timeout(self.seconds):
                with self.watch.on(name):
                    return await self.callers[id(env)](function, *given, **settings)
        except TimeoutError as error:
            self.findings.add(Code.HANG, f"{name} did not return within {self.seconds:g} s")
            raise Broken from error
        except InfrastructureError:
            raise  # not the environment's doing: the check cannot go on
        except Exception as error:
            self.findings.add(Code.RAISES, f"{name} raised {told(error)}")
            raise Broken from error
        finally:
            ended = (time.perf_counter(), time.process_time(), time.thread_time())
            self.times.append(Times(name, *(late - early for late, early in zip(ended, begin, strict=True))))

    @contextmanager
    def _contract(self) -> Iterator[None]:
        try:
            yield
        except ContractError as error:
            text = str(error)
            code = Code.REWARD_NOT_FINITE if "finite number" in text else Code.CONTRACT
            self.findings.add(code, text)
            raise Broken from error


def comparable(messages: list[Message], findings: Findings, where: str) -> str:
    """Messages as text that is equal where they are; what is no JSON is a finding."""
    try:
        return json.dumps(messages, sort_keys=True, ensure_ascii=True)
    except (TypeError, ValueError) as error:
        findings.add(Code.NOT_JSON, f"{where}: {error}")
        return repr(messages)


def told(error: BaseException) -> str:
    """An exception and where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {error!s:.300}{place}"


def replay(actions: list[Message]) -> Policy:
    """The same actions again."""
    return lambda env, messages, turn: actions[turn] if turn < len(actions) else None
