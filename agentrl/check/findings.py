"""What the checker can find: a stable code each, how bad it is, and how to mend it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Code(enum.Enum):
    """`label` is the code as it is printed. Not `error`: a warning, which a run survives and an author should know."""

    def __init__(self, label: str, error: bool, remedy: str) -> None:
        self.label = label
        self.error = error
        self.remedy = remedy

    CONTRACT = ("contract", True, "Return (messages, info) from reset and the five values from step; see docs.")
    RAISES = ("raises", True, "Mend the exception: an episode that raises is lost, and is never scored.")
    ODD_INPUT = (
        "odd-input", True,
        "A model may say anything: answer what cannot be used with a message or a low reward, do not raise.",
    )  # fmt: skip
    HANG = ("hang", True, "Give every wait in the environment a deadline of its own.")
    UNSEEDED = (
        "unseeded", True,
        "Take all randomness from `self.generator(seed)` in reset; no `random.…`, `np.random.…`, time or ids.",
    )  # fmt: skip
    SHARED_STATE = (
        "shared-state", True,
        "Make state in `reset` or `__init__` (self.x = …): nothing mutable in the class, the module or a default.",
    )  # fmt: skip
    ROW_CHANGED = ("row-changed", True, "Copy what you change: the row is recorded, and is the task's definition.")
    RESET_AGAIN = ("reset-again", True, "Let reset set every attribute that step changes.")
    PLAIN_RESET = (
        "plain-reset", False,
        "Where reset is given no seed, go on with the last generator: `self.generator(seed)` does.",
    )  # fmt: skip
    STEP_AFTER_END = (
        "step-after-end", True,
        'Keep `self.over` and raise ContractError("the episode is over; call reset first"), or use `wrap(YourEnv)`.',
    )  # fmt: skip
    SWAPPED_FLAGS = (
        "swapped-flags", True,
        "terminated: the task itself ended, won or lost. truncated: something outside cut it short.",
    )  # fmt: skip
    NEVER_TERMINATED = (
        "never-terminated", False,
        "Define `oracle`, so that a won episode is seen: whether the end is told right could not be checked.",
    )  # fmt: skip
    BOTH_FLAGS = ("both-flags", True, "An episode ends for one reason: set terminated or truncated, not both.")
    REWARD_NOT_FINITE = ("reward-not-finite", True, "Return a finite number, or None where there is no verdict.")
    REWARD_RANGE = ("reward-range", True, "Scale the reward, or correct `reward_range`.")
    ORACLE = ("oracle", True, "The oracle must end the episode with the best reward: mend the oracle or the reward.")
    EMPTY_PAYS = ("empty-pays", True, "An empty answer must earn less than a right one, or nothing is learned.")
    NO_VERDICT = ("no-verdict", True, "No episode got a reward: look at the gold answers and the reward function.")
    TOOL_SCHEMA = ("tool-schema", True, "Give every argument a type and the tool a docstring; use @tool.")
    TOOL_UNANSWERED = (
        "tool-unanswered", True,
        "Answer each call with one message of role 'tool' and its id: `await run_tools(self.tools, action)`.",
    )  # fmt: skip
    TEMPLATE = ("template", True, "Content must be text that any chat template can render, in a role that it knows.")
    ORDER = ("message-order", False, "Start with at most one system message, and end with a user or tool message.")
    HISTORY = ("history-repeated", True, "Return only what is new: the agent keeps the history.")
    NOT_JSON = ("not-json", True, "Messages and rows are stored as JSON: use str, int, float, bool, list, dict, None.")
    BLOCKS = (
        "blocks-loop", True,
        "All episodes share this event loop: await an asynchronous call, use asyncio.to_thread, or write plain `def`.",
    )  # fmt: skip
    SLOW = ("slow-step", False, "Do CPU-heavy work in `def` methods or worker processes, or the other episodes wait.")
    LEAKED_TASK = ("leaked-task", True, "Cancel and await your tasks in close.")
    LEAKED_THREAD = ("leaked-thread", True, "End and join your threads in close.")
    LEAKED_PROCESS = ("leaked-process", True, "End and wait for your processes in close.")
    LEAKED_FILE = ("leaked-file", True, "Close files and sockets in close, or open them in a `with`.")
    LEAKED_TEMPORARY = (
        "leaked-temporary",
        True,
        "Delete in close what an episode wrote; let what must stay go into one file.",
    )
    CLOSE = ("close", True, "close is called once, also where reset failed or never ran: it must not raise.")
    ROWS = ("rows", True, "`rows(split, seed)` must give the same JSON rows for the same arguments.")
    ROWS_OVERLAP = ("rows-overlap", False, "Keep evaluation rows out of the training rows.")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: what was seen, and by its code how to mend it."""

    code: Code
    seen: str

    def __str__(self) -> str:
        kind = "error" if self.code.error else "warning"
        return f"{kind} {self.code.label}: {self.seen}\n    {self.code.remedy}"


class Cost(NamedTuple):
    """Milliseconds of the environment's own, the least of several plays: on the clock, and of CPU."""

    reset_ms: float
    reset_cpu_ms: float
    step_ms: float
    step_cpu_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found. `str(report)` is what `agentrl check` prints; `episodes` were played."""

    env: str
    findings: tuple[Finding, ...]
    episodes: int
    cost: Cost | None

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings may be there."""
        return not any(finding.code.error for finding in self.findings)

    @property
    def codes(self) -> frozenset[str]:
        """The codes found, as they are printed."""
        return frozenset(finding.code.label for finding in self.findings)

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        if self.cost is not None:
            cost = self.cost
            lines.append(
                f"reset {cost.reset_ms:.2f} ms ({cost.reset_cpu_ms:.2f} of CPU), "
                f"step {cost.step_ms:.2f} ms ({cost.step_cpu_ms:.2f} of CPU)"
            )
        errors = sum(finding.code.error for finding in self.findings)
        lines.append(
            f"{self.env}: {self.episodes} episodes played, {errors} errors, {len(self.findings) - errors} warnings"
        )
        return "\n".join(lines)


class Findings:
    """Collects findings: each code once, with the first thing that was seen."""

    def __init__(self) -> None:
        self._found: dict[Code, Finding] = {}

    def add(self, code: Code, seen: str) -> None:
        """Note it, unless this code is known already."""
        self._found.setdefault(code, Finding(code, seen if len(seen) < 600 else f"{seen[:600]}…"))

    def __contains__(self, code: Code) -> bool:
        return code in self._found

    def sorted(self) -> tuple[Finding, ...]:
        """Errors first, each kind in the order of the codes."""
        order = list(Code)
        return tuple(sorted(self._found.values(), key=lambda f: (not f.code.error, order.index(f.code))))
