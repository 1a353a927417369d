"""Why processes ended, read from what they wrote: the first error on top, of several ranks that of the first one."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agentrl.child import Child

TAIL_LINES = 12


class Death(NamedTuple):
    """How a child ended. `text` names it, its exit code, the first error and the end of its log.

    `own` is false where it was killed from outside: that says nothing of whether it will happen again.
    """

    code: int
    text: str
    own: bool = True


class RankEnd(NamedTuple):
    """What is known of one rank's end. `code` is negative for a signal, None where nobody saw it."""

    rank: int
    log: Path
    lines: Sequence[str] = ()
    """Its log, from its start on."""
    code: int | None = None

    @property
    def said(self) -> Said | None:
        """What the rank said itself when it failed."""
        return said(self.lines)

    @property
    def signal(self) -> int:
        """The signal that ended it, other than the one that ranks are asked to end with; else 0."""
        return -self.code if self.code is not None and self.code < 0 and self.code != -signal.SIGTERM else 0


class Said(NamedTuple):
    """A rank's own words on its end, and when it said them (Unix seconds)."""

    at: float
    text: str


def said(lines: Sequence[str]) -> Said | None:
    """A rank's own words in a log."""
    match = next((match for line in lines if (match := _SAID.match(line))), None)
    return None if match is None else Said(float(match[1]), match[2])


def read_rank(rank: int, log: Path, start: int, code: int | None) -> RankEnd:
    """A rank's end, as its log has it from byte `start` on."""
    return RankEnd(rank, log, read_lines(log, start), code)


def read_lines(log: Path, start: int) -> list[str]:
    """The lines of a log from byte `start` on; none where there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def death(child: Child, code: int) -> str:
    """How `child` ended: name, code, first error and the end of its log."""
    lines = read_lines(child.log, child.log_start)
    words = said(lines)
    first = first_error(lines) or (words.text if words is not None else None)
    return f"{child.name} {_how(code)}{f': {first}' if first else ''}\n{_end_of(child.log, lines)}"


def first_to_fail(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that the others ended because of; None where no rank says or shows anything.

    The first one to fail by itself; else one that a signal ended; else the first that lost the others. A rank whose
    neighbour is gone fails as well, in a collective, and may say so first.
    """
    told = [end for end in ends if end.said is not None or end.signal]
    return min(told, key=_order, default=None)


def group_death(name: str, code: int, ends: Sequence[RankEnd]) -> Death | None:
    """How a group of ranks ended, by the rank that failed first; None where no rank says or shows anything."""
    first = first_to_fail(ends)
    if first is None:
        return None
    words = first.said
    if words is not None:
        how = f"rank {first.rank} failed first: {first_error(first.lines) or words.text}"
    else:
        how = f"rank {first.rank} {_how(-first.signal)}"
    text = f"{name} {_how(code)}: {how}\n{_end_of(first.log, first.lines)}"
    return Death(code, text, own=words is not None)


def codes_by_rank(lines: Sequence[str]) -> Mapping[int, int]:
    """Exit codes from the summary that torchrun ends with; negative ones are signals."""
    found: dict[int, int] = {}
    rank = None
    for line in lines:
        if match := _RANK.match(line):
            rank = int(match[1])
        elif (match := _CODE.match(line)) and rank is not None:
            found[rank], rank = int(match[1]), None
    return found


def signed(code: int) -> int:
    """The exit code with a signal as a negative number: the guard of a child reports it as 128 + its number."""
    return 128 - code if code > 128 else code


def first_error(lines: Sequence[str]) -> str | None:
    """The first exception of a log, the last of its chain: later tracebacks are mostly its consequences."""
    found = None
    for number, line in enumerate(lines):
        if match := _ERROR.match(line.strip()):
            found = match[1]
            if not any(_CHAINED.search(text) for text in lines[number + 1 : number + 6]):
                return found
    return found


def is_consequence(text: str) -> bool:
    """Whether an error tells of a process that is gone, rather than of what happened here."""
    return _CONSEQUENCE.search(text) is not None


def remedy(text: str, memory: str) -> str:
    """What to do about the error of a death's first line; `memory` is the advice where memory did not suffice."""
    first = text.partition("\n")[0]
    advice = {
        r"[Oo]ut ?[Oo]f ?[Mm]emory|MemoryError|Cannot allocate memory|can't allocate memory": memory,
        r"SIGKILL": f"the kernel may have ended it for memory (dmesg tells): then {memory}",
        r"No module named": f"install what is missing for {sys.executable}",
        r"No space left|File too large|Disk quota": "free some space, or set run_dir to another disk",
        r"stood still|RanksDoNotMeet": "see that all hosts reach each other at all ports",
        r"[Tt]imed out": "raise train.collective_timeout if a pass is that slow; else see which rank did not come",
    }
    return next((what for kind, what in advice.items() if re.search(kind, first)), "mend the cause")


_SAID = re.compile(r"^agentrl\.train: rank \d+ failed at (\d+(?:\.\d+)?): (.*)$")
_RANK = re.compile(r"^\s*rank\s*: (\d+) ")
_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) ")
_ERROR = re.compile(r"^(?:\[(?:rank)?\d+\]:?\s*)?((?:[\w.]+\.)?\w*(?:Error|Exception|Exceeded|Lost|Refused)\b:? ?.*)$")
_CHAINED = re.compile(r"direct cause of the following exception|During handling of the above exception")
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset|refused|aborted)|Broken pipe|gloo|NCCL|ncclRemote|Dist(Backend|Network|Store)?Error|"
    r"process group|[Tt]imed out (after|waiting)|TCPStore|[Ss]ocket (closed|error)|recvValue failed"
)


def _order(end: RankEnd) -> tuple[int, float, int]:
    words = end.said
    if words is None:
        return 1, 0.0, end.rank
    return 2 if is_consequence(words.text) else 0, words.at, end.rank


def _how(code: int) -> str:
    code = signed(code)
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def _end_of(log: Path, lines: Sequence[str]) -> str:
    return "\n".join([f"the end of {log}:", *(f"  | {line}" for line in lines[-TAIL_LINES:])])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
