"""What one session sampled, as trajectories: incoming histories are matched against it, new turns are appended or
branch off.

A `Line` is a trajectory in the making. A call names its `Place`: after which turn of which line it goes on, or that a
new line starts, and why. Lines that branched off share their parent's tokens; those count as context there, so nothing
is trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from agentrl.endpoint.messages import canonical, copied, same
from agentrl.endpoint.render import Prompt, Setting
from agentrl.endpoint.tape import Strip, strip
from agentrl.engine.types import Completion
from agentrl.errors import EngineError
from agentrl.types import Context, Int32Array, Message, Sampled, Segment, SplitReason, Trajectory

_NOTHING: Int32Array = np.empty(0, np.int32)


class Turn(NamedTuple):
    """A sampled turn: how many messages, tokens and own segments its line has after it, and the call that made it."""

    messages: int
    tokens: int
    segments: int
    call: int


@dataclass(slots=True, eq=False)
class Line:
    """A trajectory in the making.

    `seen` is the history as the client writes it, `known` the same in canonical form. `texts` are prompt and sampled
    text in turn, `raw` the sampled texts by message.
    """

    index: int
    agent: str
    reason: SplitReason
    setting: Setting
    parent: Line | None = None
    parent_turn: int = -1
    shared: int = 0
    strip: Strip | None = None
    segments: list[Segment] = field(default_factory=list)
    seen: list[Message] = field(default_factory=list)
    known: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    sampled: set[int] = field(default_factory=set)
    raw: dict[int, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> Int32Array:
        """`[n]` everything that was shown and sampled."""
        return _NOTHING if self.strip is None else self.strip.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a call goes on: after `turn` of `line`, or from scratch where `line` is None. `new` are the canonical
    messages after it."""

    line: Line | None
    turn: int
    given: Sequence[Message]
    new: list[Message]
    setting: Setting
    agent: str
    reason: SplitReason

    def restarted(self, reason: SplitReason) -> Place:
        """The same call, rendered from scratch into a new line."""
        if self.line is None:
            return self
        kept = self.line.known[: self.line.turns[self.turn].messages]
        return Place(None, -1, self.given, [*kept, *self.new], self.setting, self.agent, reason)

    def shown(self, prompt: Prompt) -> Strip:
        """Everything that the engine is sent: what is there, and the prompt after it."""
        if self.line is None or self.line.strip is None:
            return strip(prompt.tokens)
        before = self.line.turns[self.turn].tokens
        return Strip(self.line.strip.tape, self.line.tokens[:before]).then(prompt.tokens)


class Sample(NamedTuple):
    """A completion with what the client was told of it; `said` is its `text` without the end token."""

    completion: Completion
    temperature: float
    trained: bool
    message: Message
    text: str
    said: str
    call: int


class Recorder:
    """The lines of a session."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._recent: Line | None = None
        self._grown: dict[int, int] = {}

    def locate(self, given: Sequence[Message], setting: Setting, agent: str) -> Place:
        """Where a request with these messages goes on. Costs time linear in what is new while a conversation grows."""
        for line in ([self._recent] if self._recent is not None else []) + sorted(self.lines, key=_longest):
            if (place := self._exact(line, given, setting, agent)) is not None:
                return place
        known = [canonical(message, i) for i, message in enumerate(given)]
        mine = [line for line in self.lines if line.agent == agent]
        if not mine:
            return Place(None, -1, given, known, setting, agent, SplitReason.START)
        shared = [(_shared(known, line), line.index, line) for line in mine]
        length, _, line = max(shared, key=lambda s: (s[0] if _same_setting(s[2].setting, setting) else -1, s[0], s[1]))
        if not _same_setting(line.setting, setting):
            return Place(None, -1, given, known, setting, agent, SplitReason.EDITED if length else SplitReason.OTHER)
        reason = _classify(known, line, length)
        turn = next((i for i in reversed(range(len(line.turns))) if line.turns[i].messages <= length), -1)
        if turn < 0:
            # Nothing sampled is shared, but the line remembers which history it left.
            return Place(None, -1, given, known, line.setting, agent, reason)
        at = line.turns[turn].messages
        if at == len(line.seen):
            line.seen = [copied(message) for message in given[:at]]
        return Place(line, turn, given, known[at:], line.setting, agent, reason)

    def _exact(self, line: Line, given: Sequence[Message], setting: Setting, agent: str) -> Place | None:
        n = len(line.seen)
        if line.agent != agent or given[:n] != line.seen or not _same_setting(line.setting, setting):
            return None
        new = [canonical(message, i) for i, message in enumerate(given[n:], n)]
        return Place(line, len(line.turns) - 1, given, new, line.setting, agent, SplitReason.BRANCH)

    def locate_text(self, prompt: Int32Array | str, setting: Setting, agent: str) -> tuple[Place, int]:
        """Where a raw prompt goes on, and how much of it (tokens or characters) is already there."""
        mine = [line for line in self.lines if line.agent == agent]
        for line in reversed(mine):
            known = line.tokens if isinstance(prompt, np.ndarray) else "".join(line.texts)
            if line.setting is setting and len(prompt) > len(known) and _begins(prompt, known):
                return Place(line, len(line.turns) - 1, (), [], setting, agent, SplitReason.BRANCH), len(known)
        return Place(None, -1, (), [], setting, agent, SplitReason.OTHER if mine else SplitReason.START), 0

    def append(self, place: Place, prompt: Prompt, shown: Strip, sample: Sample) -> Line:
        """Record a turn that was sampled after `shown`, which ends with `prompt`; EngineError where the engine's
        numbers cannot be."""
        # All that can fail comes first: a turn is recorded whole or not at all.
        sampled = _sampled_segments(sample)
        seen = [copied(message) for message in place.given[_at(place) :]]
        answer, known = copied(sample.message), canonical(sample.message)
        line = place.line
        if line is None or place.turn != len(line.turns) - 1:
            line = self._branch(place)
        line.seen += seen
        line.known += place.new
        if prompt.tokens.size:
            line.segments.append(Segment(prompt.tokens, None, Context()))
        line.segments += sampled
        line.strip = shown.then(sample.completion.tokens)
        line.texts += (prompt.text, sample.text)
        line.sampled.add(len(line.known))
        line.raw[len(line.known)] = sample.said
        line.seen.append(answer)
        line.known.append(known)
        line.turns.append(Turn(len(line.known), int(line.tokens.size), len(line.segments), sample.call))
        self._recent = line
        if sampled:
            self._grown.pop(line.index, None)
            self._grown[line.index] = int(line.tokens.size)
        return line

    def _branch(self, place: Place) -> Line:
        parent, turn, reason = place.line, place.turn, place.reason
        if parent is None:
            left = self._left(place)
            if reason is SplitReason.START and any(line.agent == place.agent for line in self.lines):
                # Another call of this agent was answered while this one ran.
                reason = SplitReason.BRANCH if left is not None else SplitReason.OTHER
            line = Line(len(self.lines), place.agent, reason, place.setting)
            line.parent = left if reason is SplitReason.BRANCH else None
        else:
            at = parent.turns[turn]
            line = Line(len(self.lines), place.agent, reason, place.setting, parent, turn, at.tokens)
            line.seen, line.known = parent.seen[: at.messages], parent.known[: at.messages]
            line.sampled = {i for i in parent.sampled if i < at.messages}
            line.raw = {i: text for i, text in parent.raw.items() if i < at.messages}
            line.texts = parent.texts[: 2 * turn + 2]
        self.lines.append(line)
        return line

    def _left(self, place: Place) -> Line | None:
        """The line that a branch from before the first sampled turn went away from."""
        roots = [
            (_shared(place.new, x), -x.index, x) for x in self.lines if x.agent == place.agent and x.parent_turn < 0
        ]
        length, _, line = max(roots, default=(0, 0, None), key=lambda root: root[:2])
        return line if length else None

    def marks(self) -> tuple[tuple[int, int], ...]:
        """The lines that sampled since the last call, in order, each with its length."""
        marks = tuple(self._grown.items())
        self._grown = {}
        return marks

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Everything recorded. Turns that the agent dropped are not trained; a line of only such turns is
        `abandoned`."""
        kept = {line.index: len(line.turns) for line in self.lines}
        for line in self.lines:
            self._drop(line, kept)
        return tuple(_trajectory(line, kept[line.index]) for line in self.lines)

    def _drop(self, line: Line, kept: dict[int, int]) -> None:
        forks = [x for x in self.lines if x.parent is line and x.reason is SplitReason.BRANCH]
        for turn in sorted({x.parent_turn for x in forks}):
            rivals = [(self._latest(line, turn + 1), -1)]
            rivals += [(self._latest(x, 0), -x.index - 2) for x in forks if x.parent_turn == turn]
            _, winner = max(rivals)
            if winner != -1:
                self._forget(line, turn + 1, kept)
            for fork in forks:
                if fork.parent_turn == turn and -fork.index - 2 != winner:
                    self._forget(fork, 0, kept)

    def _latest(self, line: Line, turn: int) -> int:
        own = [x.call for x in line.turns[turn:]]
        return max(
            [*own, *(self._latest(x, 0) for x in self.lines if x.parent is line and x.parent_turn >= turn)], default=-1
        )

    def _forget(self, line: Line, turn: int, kept: dict[int, int]) -> None:
        kept[line.index] = min(kept[line.index], turn)
        for child in self.lines:
            if child.parent is line and child.parent_turn >= turn:
                self._forget(child, 0, kept)


def _begins(prompt: Int32Array | str, known: Int32Array | str) -> bool:
    if isinstance(prompt, str) or isinstance(known, str):
        return isinstance(prompt, str) and isinstance(known, str) and prompt.startswith(known)
    return np.array_equal(prompt[: len(known)], known)


def _longest(line: Line) -> int:
    return -len(line.seen)


def _at(place: Place) -> int:
    return 0 if place.line is None else place.line.turns[place.turn].messages


def _same_setting(one: Setting, other: Setting) -> bool:
    return one is other or (one.tools == other.tools and one.extra == other.extra)


def _shared(known: Sequence[Message], line: Line) -> int:
    n = 0
    for i, (given, mine) in enumerate(zip(known, line.known, strict=False)):
        if not same(given, mine, sampled=i in line.sampled):
            break
        n += 1
    return n


def _classify(known: Sequence[Message], line: Line, length: int) -> SplitReason:
    """Why a history that shares its first `length` messages with a line does not extend it (if it does, the reason is
    unused)."""
    later = [m for m in line.known[length + 1 :] if m["role"] != "system"]
    if any(m in later for m in known[length:]):
        return SplitReason.EDITED
    if length == len(known) or length - 1 in line.sampled:
        return SplitReason.BRANCH
    if length in line.sampled and known[length]["role"] != "assistant":
        return SplitReason.BRANCH
    return SplitReason.EDITED if length else SplitReason.OTHER


def _sampled_segments(sample: Sample) -> list[Segment]:
    completion = sample.completion
    try:
        return [
            Segment(
                completion.tokens[span.start : span.end],
                completion.logprobs[span.start : span.end],
                Sampled(span.version, sample.temperature, sample.trained),
            )
            for span in completion.spans
        ]
    except ValueError as error:
        raise EngineError(f"the engine's reply cannot be recorded: {error}") from error


def _trajectory(line: Line, kept: int) -> Trajectory:
    segments = list(line.segments)
    if line.shared:
        prefix = line.tokens[: line.shared]
        if segments and isinstance(segments[0].source, Context):
            prefix = np.concatenate((prefix, segments[0].tokens))
            segments = segments[1:]
        segments = [Segment(prefix, None, Context()), *segments]
    if 0 < kept < len(line.turns):
        first = line.turns[kept - 1].segments + len(segments) - len(line.segments)
        segments[first:] = [_untrained(segment) for segment in segments[first:]]
    return Trajectory(tuple(segments), line.reason, line.agent, abandoned=kept == 0)


def _untrained(segment: Segment) -> Segment:
    if not isinstance(segment.source, Sampled):
        return segment
    return Segment(segment.tokens, segment.logprobs, Sampled(segment.source.version, segment.source.temperature, False))
