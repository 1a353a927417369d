"""Operators that break an environment in one way each, whatever the environment, and the code that must be found."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.tool import tool
from agentrl.types import Info, Message, Row, Step

STARTED: list[int] = []
"""Descriptors that the leaking operators opened, for the test to close."""
RELEASE = threading.Event()
_THREAD = "worker of mine"


def end_what_was_started() -> None:
    """The threads and descriptors of leaking operators: the next check counts what there is."""
    RELEASE.set()
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(60.0)
    while STARTED:
        os.close(STARTED.pop())


class Operator(NamedTuple):
    """`needs_tools`: has no meaning where there are none."""

    name: str
    code: str
    apply: Callable[[type[Env]], type[Env]]
    needs_tools: bool = False


def mutant(
    base: type[Env],
    *,
    start: Callable[[Any, list[Message]], Any] | None = None,
    before: Callable[[Any, Message], Any] | None = None,
    after: Callable[[Any, Step], Any] | None = None,
    **attributes: Any,
) -> type[Env]:
    """A subclass: `start` changes the first messages, `before` sees the action, `after` changes the step."""

    async def reset(self: Any, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
        messages, info = await base.reset(self, seed=seed)
        messages = copy.deepcopy(messages)
        return (start(self, messages) or messages if start else messages), info

    async def step(self: Any, action: Message) -> Any:
        if before is not None:
            before(self, action)
        result = await base.step(self, action)
        return after(self, result) if after else result

    return type(base.__name__, (base,), {"reset": reset, "step": step, "__module__": base.__module__, **attributes})


def says(text: Callable[[Any], object]) -> Callable[[Any, list[Message]], None]:
    """Adds to the last of the first messages."""

    def change(self: Any, messages: list[Message]) -> None:
        messages[-1]["content"] += f" {text(self)}"

    return change


def earns(reward: Callable[[float], float]) -> Callable[[Any, Step], Step]:
    """Changes the reward."""
    return lambda self, step: step._replace(reward=reward(step.reward or 0.0))


def _count_on_class(self: Any) -> int:
    type(self).played += 1
    return int(type(self).played)


def _count_in_list(self: Any) -> int:
    self.history.append(1)
    return len(self.history)


def _default_list(base: type[Env]) -> type[Env]:
    # The mutable default is the mutation.
    async def reset(
        self: Any,
        *,
        seed: int | None = None,
        options: Any = None,
        log: list[int] = [],  # noqa: B006
    ) -> tuple[list[Message], Info]:
        messages, info = await base.reset(self, seed=seed)
        log.append(1)
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']} {len(log)}"}], info

    return mutant(base, reset=reset)


def _one_generator(base: type[Env]) -> type[Env]:
    return mutant(base, start=says(lambda self: self.dice.random()), dice=random.Random(1))


def _seeds_the_process(base: type[Env]) -> type[Env]:
    async def reset(self: Any, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], Info]:
        random.seed(seed)
        return await base.reset(self, seed=seed)

    return mutant(
        base, reset=reset, after=lambda self, step: step._replace(reward=(step.reward or 0) + random.random())
    )


def _no_guard(base: type[Env]) -> type[Env]:
    async def step(self: Any, action: Message) -> Step:
        try:
            return await base.step(self, action)
        except ContractError:
            return Step([], 0.0, True, False, {})

    return mutant(base, step=step)


def _begins_anew(base: type[Env]) -> type[Env]:
    async def step(self: Any, action: Message) -> Step:
        try:
            return await base.step(self, action)
        except ContractError:
            messages, _ = await self.reset(seed=1)
            return Step(messages, 0.0, False, False, {})

    return mutant(base, step=step)


def _unclear(base: type[Env]) -> type[Env]:
    async def step(self: Any, action: Message) -> Step:
        try:
            return await base.step(self, action)
        except ContractError as error:
            raise AttributeError("'NoneType' object has no attribute 'strip'") from error

    return mutant(base, step=step)


def _spawn(self: Any, messages: list[Message]) -> None:
    os.posix_spawn("/bin/sleep", ["sleep", "600"], {})


def _runs(self: Any, messages: list[Message]) -> None:
    subprocess.run(["true"], check=True)


def _open(self: Any, messages: list[Message]) -> None:
    STARTED.append(os.open(os.devnull, os.O_RDONLY))


def _task(self: Any, messages: list[Message]) -> None:
    self.background = asyncio.get_running_loop().create_task(asyncio.sleep(3600))


def _thread(self: Any, messages: list[Message]) -> None:
    threading.Thread(target=RELEASE.wait, daemon=True, name=_THREAD).start()


def _temporary(self: Any, messages: list[Message]) -> None:
    number, _ = tempfile.mkstemp()
    os.close(number)


@tool
async def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: any word
    """
    return "nothing"


def _tools_with(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any, list[Message]], None]:
    def start(self: Any, messages: list[Message]) -> None:
        given = self.tools or (lookup,)
        broken = copy.copy(given[0])
        broken.schema = copy.deepcopy(broken.schema)
        change(broken.schema["function"])
        self.tools = (broken, *given[1:])

    return start


def _untyped(function: dict[str, Any]) -> None:
    function["parameters"]["properties"] = {name: {} for name in [*function["parameters"]["properties"], "more"]}


def _undescribed(function: dict[str, Any]) -> None:
    function.pop("description", None)


def _misnamed(function: dict[str, Any]) -> None:
    function["name"] = "look up"


def _unanswered(self: Any, step: Step) -> Step:
    return step._replace(observation=[message for message in step.observation if message["role"] != "tool"])


def _changes_row(self: Any, action: Message) -> None:
    self.row["seen"] = self.row.get("seen", 0) + 1


def _remembers(base: type[Env]) -> type[Env]:
    def __init__(self: Any, row: Row, **args: Any) -> None:
        base.__init__(self, row, **args)
        self.turns = 0

    def before(self: Any, action: Message) -> None:
        self.turns += 1

    return mutant(base, start=says(lambda self: self.turns), before=before, __init__=__init__)


def _whole_history(base: type[Env]) -> type[Env]:
    def start(self: Any, messages: list[Message]) -> None:
        self.said = list(messages)

    def before(self: Any, action: Message) -> None:
        self.said.append(action)

    def after(self: Any, step: Step) -> Step:
        self.said += step.observation
        return step._replace(observation=list(self.said))

    return mutant(base, start=start, before=before, after=after)


def _raising_close(base: type[Env]) -> type[Env]:
    async def close(self: Any) -> None:
        await base.close(self)
        raise RuntimeError("cannot close")

    return mutant(base, close=close)


def _strict(self: Any, action: Message) -> None:
    if not (action["content"] or action.get("tool_calls")):
        raise ValueError("an answer is needed")


def _fails(self: Any, action: Message) -> None:
    raise RuntimeError("license expired")


def _swap(self: Any, step: Step) -> Step:
    return step._replace(terminated=step.truncated, truncated=step.terminated)


def _pays(self: Any, step: Step) -> Step:
    return step._replace(reward=1.0, terminated=True)


def _with_message(**fields: Any) -> Callable[[Any, list[Message]], None]:
    def start(self: Any, messages: list[Message]) -> None:
        messages.append({"role": "user", "content": "Begin.", **fields})

    return start


def start_with(change: Callable[[Any, list[Message]], Any]) -> Callable[[type[Env]], type[Env]]:
    return lambda base: mutant(base, start=change)


def after_with(change: Callable[[Any, Step], Any]) -> Callable[[type[Env]], type[Env]]:
    return lambda base: mutant(base, after=change)


def before_with(change: Callable[[Any, Message], Any]) -> Callable[[type[Env]], type[Env]]:
    return lambda base: mutant(base, before=change)


OPERATORS = (
    Operator("unseeded start", "unseeded", start_with(says(lambda self: random.random()))),
    Operator("start by the clock", "unseeded", start_with(says(lambda self: time.monotonic_ns()))),
    Operator("start by a dice of its own", "unseeded", start_with(says(lambda self: random.SystemRandom().random()))),
    Operator("unseeded reward", "unseeded", after_with(earns(lambda reward: reward + random.random()))),
    Operator("seeds the process's generator", "unseeded", _seeds_the_process),
    Operator("counts on the class", "shared-state", lambda base: mutant(base, start=says(_count_on_class), played=0)),
    Operator("lists on the class", "shared-state", lambda base: mutant(base, start=says(_count_in_list), history=[])),
    Operator(
        "lists on the class unseen", "shared-state",
        lambda base: mutant(base, before=lambda self, action: self.history.append(action), history=[]),
    ),
    Operator("one generator for all", "shared-state", _one_generator),
    Operator("mutable default", "shared-state", _default_list),
    Operator("changes its row", "row-changed", before_with(_changes_row)),
    Operator("reset forgets a counter", "reset-again", _remembers),
    Operator("goes on after the end", "step-after-end", _no_guard),
    Operator("begins anew after the end", "step-after-end", _begins_anew),
    Operator("unclear error after the end", "step-after-end", _unclear),
    Operator("swapped flags", "swapped-flags", after_with(_swap)),
    Operator("both flags", "both-flags", after_with(lambda self, step: step._replace(truncated=step.terminated))),
    Operator("sleeps in step", "blocks-loop", before_with(lambda self, action: time.sleep(0.0001))),
    Operator("sleeps in reset", "blocks-loop", start_with(lambda self, messages: time.sleep(0.0001))),
    Operator("waits for a process", "blocks-loop", start_with(_runs)),
    Operator("leaves a task", "leaked-task", start_with(_task)),
    Operator("leaves a thread", "leaked-thread", start_with(_thread)),
    Operator("leaves a process", "leaked-process", start_with(_spawn)),
    Operator("leaves a file open", "leaked-file", start_with(_open)),
    Operator("leaves a temporary file", "leaked-temporary", start_with(_temporary)),
    Operator("reward far out", "reward-range", after_with(earns(lambda reward: 1000.0 * reward + 5.0))),
    Operator("reward below", "reward-range", after_with(earns(lambda reward: reward - 0.5))),
    Operator("reward NaN", "reward-not-finite", after_with(earns(lambda reward: float("nan")))),
    Operator("reward infinite", "reward-not-finite", after_with(earns(lambda reward: float("inf")))),
    Operator("reward a text", "reward-not-finite", after_with(lambda self, step: (step[0], "1.0", *step[2:]))),
    Operator("never a verdict", "no-verdict", after_with(lambda self, step: step._replace(reward=None))),
    Operator("pays for nothing", "empty-pays", after_with(_pays)),
    Operator("four values", "contract", after_with(lambda self, step: (step[0], step[1], step[2], step[4]))),
    Operator("no info", "contract", after_with(lambda self, step: (*step[:4], None))),
    Operator("flags that are no bool", "contract", after_with(lambda self, step: (*step[:2], None, *step[3:]))),
    Operator("messages as a text", "contract", start_with(lambda self, messages: "What is 1 + 1?")),
    Operator("tool without types", "tool-schema", start_with(_tools_with(_untyped))),
    Operator("tool without a description", "tool-schema", start_with(_tools_with(_undescribed))),
    Operator("tool with a blank in its name", "tool-schema", start_with(_tools_with(_misnamed))),
    Operator("calls unanswered", "tool-unanswered", after_with(_unanswered), needs_tools=True),
    Operator("content an object", "template", start_with(_with_message(content={"question": "?"}))),
    Operator("content an image", "template", start_with(_with_message(content=[{"type": "image"}]))),
    Operator("role unknown", "template", start_with(_with_message(role="function"))),
    Operator("a lone surrogate", "template", start_with(_with_message(content="byte \udcff"))),
    Operator("no first message", "template", start_with(lambda self, messages: messages.clear())),
    Operator("a set in a message", "not-json", start_with(_with_message(words={"a", "b"}))),
    Operator("ends with an assistant", "message-order", start_with(_with_message(role="assistant"))),
    Operator("repeats the history", "history-repeated", _whole_history),
    Operator("raises on odd input", "odd-input", before_with(_strict)),
    Operator("raises always", "raises", before_with(_fails)),
    Operator("raises in close", "close", _raising_close),
)  # fmt: skip
