"""Continue a conversation token by token: only what is new is rendered, what was sampled stays as it is.

The method is the template's own difference. A short stand-in history that ends with an assistant turn is rendered
together with the new messages; what the template writes after that turn's end token is what follows the sampled
tokens. `Renderer` proves at start, on conversations of several shapes, that this does not depend on the history that
was left out.
"""

from __future__ import annotations

import marshal
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from agentrl.endpoint.messages import copied
from agentrl.endpoint.template import ChatTemplate
from agentrl.errors import ConfigError, ContractError
from agentrl.types import Context, Demonstration, Int32Array, Message, Segment, Trajectory

T = TypeVar("T")
# What stands in for the history; random, so that no message can hold it.
_NONCE = f"{secrets.randbelow(10**18):018d}"
_QUESTION = f"q\ue002{_NONCE}\ue003"
_ANSWER = f"a\ue002{_NONCE}\ue003"


class Prompt(NamedTuple):
    """What is shown to the model next, and whether it opened `<think>`; `opened` is the part of it that already belongs
    to the answer: the beginning of a call that was asked for."""

    text: str
    tokens: Int32Array
    thinking: bool
    opened: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the template is given besides messages; equal for all calls of a trajectory."""

    tools: Sequence[Mapping[str, Any]] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    prepared: list[Any] | None = None
    key: bytes | None = None


class Recent(Generic[T]):
    """The latest results of a pure function, by key. Callers must not change them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[bytes, T] = OrderedDict()

    def get(self, key: bytes | None, make: Callable[[], T]) -> T:
        """What was made for this key, or what `make` returns; without a key nothing is kept."""
        if key is None:
            return make()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._kept[key] = make()
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return made


class CannotContinue(Exception):
    """The template's text after a sampled turn cannot be told; a new trajectory has to start."""


class Renderer:
    """Turns canonical messages into prompts, from scratch (`start`) or after a sampled turn (`extend`).

    `end_id` closes a turn, `end_ids` are all tokens that may stop one; `reason` says why the template cannot be
    continued, None where it can.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.end_ids = template.end_ids
        self.reason: str | None = None
        self._results_reason: str | None = None
        # The episodes of a group start alike, and environments repeat themselves.
        self._prompts: Recent[Prompt] = Recent(256)
        self._settings: Recent[Setting] = Recent(1024)
        self.end_id, self.end_text = -1, ""
        self._end_texts: list[str] = []
        try:
            self._find_end()
            self._prove()
        except (CannotContinue, ContractError) as error:
            self.reason = str(error)

    def require_proof(self) -> None:
        """ConfigError where the template cannot be continued exactly."""
        if self.reason is not None:
            raise ConfigError(
                f"this chat template cannot be continued exactly: {self.reason}. Use another template, or set "
                'endpoint.unproven_template = "turn" to make every turn its own trajectory'
            )

    def setting(self, tools: Sequence[Mapping[str, Any]] = (), extra: Mapping[str, Any] | None = None) -> Setting:
        """Tools and template arguments, made ready for rendering once."""
        given, arguments = copied(list(tools)), copied(dict(extra or {}))
        key = _key(given, arguments)

        def make() -> Setting:
            name = None if key is None else blake2b(key, digest_size=16).digest()
            return Setting(given, arguments, self.template.prepared_tools(given), name)

        return self._settings.get(key, make)

    def start(self, messages: Sequence[Message], setting: Setting) -> Prompt:
        """The whole conversation, with the opening of the assistant's next turn."""
        key = None if setting.key is None else _key(setting.key, list(messages))
        return self._prompts.get(key, lambda: self.prompt(self.full_text(messages, setting, generation=True)))

    def full_text(self, messages: Sequence[Message], setting: Setting, *, generation: bool) -> str:
        """The template's text for a whole conversation."""
        ready = [self.template.prepare(message) for message in messages]
        return self.template.text_of_prepared(ready, setting.prepared, generation=generation, extra=setting.extra)

    def extend(self, last: Message, new: Sequence[Message], setting: Setting, *, ended_by: int | None) -> Prompt:
        """What follows a sampled turn `last` when the messages `new` come after it.

        `ended_by` is the last sampled token. Where it is not the template's own end of turn (the turn was cut by a
        limit or a stop string), that comes first. CannotContinue where the template gives no certain answer.
        """
        key = _key(setting.key, last.get("tool_calls"), list(new), ended_by) if setting.key else None
        return self._prompts.get(key, lambda: self._extended(last, new, setting, ended_by))

    def _extended(self, last: Message, new: Sequence[Message], setting: Setting, ended_by: int | None) -> Prompt:
        if self._results_reason is not None and _has_results(new):
            raise CannotContinue(self._results_reason)
        ready = [self.template.prepare(message) for message in new]
        stand_in = self._stand_in(last)
        calls: list[Any] = stand_in[-1].get("tool_calls", [])
        # A template may refuse a turn with several calls, or with any, though the model sampled them: what comes after
        # is the same.
        fallbacks: tuple[list[Any], ...] = (calls[:1], []) if calls else ()
        for fewer in fallbacks:
            try:
                return self._following(self._after(stand_in, ready, setting), ended_by)
            except ContractError:
                stand_in = [stand_in[0], {**stand_in[-1], "tool_calls": fewer}]
                if not fewer:
                    del stand_in[-1]["tool_calls"]
        return self._following(self._after(stand_in, ready, setting), ended_by)

    def _following(self, tail: str, ended_by: int | None) -> Prompt:
        """What follows a sampled turn, of `tail` that begins with the template's own end token."""
        end = "" if ended_by is None else self.end_text_of(ended_by)
        return self.prompt(tail.removeprefix(end), after=end) if end and tail.startswith(end) else self.prompt(tail)

    def end_text_of(self, token: int) -> str:
        """The text of a token that ends turns; empty for all others."""
        return next((text for text in self._end_texts if self.template.added[text][0] == token), "")

    def opens_thinking(self, text: str) -> bool:
        """Whether a prompt leaves the model inside a `<think>` that the template opened."""
        return text.rstrip().endswith("<think>")

    def demonstrate(self, messages: Sequence[Message], setting: Setting) -> Trajectory:
        """A conversation to imitate: the assistant's turns are `Demonstration`, each with its end token, all else
        `Context`.

        ContractError where the conversation has no assistant turn or the template does not open turns as it renders
        them.
        """
        segments: list[Segment] = []
        last = -1
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.full_text(messages[:i], setting, generation=True)
            after = self.full_text(messages[: i + 1], setting, generation=False)
            if not after.startswith(before):
                raise ContractError(
                    f"the chat template renders messages[{i}] differently from how it opens an assistant turn"
                )
            said = self._through_end(after[len(before) :])
            if last < 0:
                ended, shown = "", self.prompt(before)
            else:
                ended = self.end_text
                shown = self.extend(messages[last], messages[last + 1 : i], setting, ended_by=self.end_id)
            if shown.tokens.size:
                segments.append(Segment(shown.tokens, None, Context()))
            segments.append(Segment(self._behind(shown, ended, said), None, Demonstration()))
            last = i
        if last < 0:
            raise ContractError("a conversation to imitate needs at least one assistant message")
        return Trajectory(tuple(segments))

    def _behind(self, shown: Prompt, ended: str, text: str) -> Int32Array:
        """Text as it is encoded behind a prompt, which `ended` preceded; by itself where the two would melt."""
        whole = self.template.encode_text(ended + shown.text + text)[bool(ended) :]
        n = shown.tokens.size
        return whole[n:] if np.array_equal(whole[:n], shown.tokens) else self.template.encode_text(text)

    def prompt(self, text: str, after: str = "") -> Prompt:
        """Rendered text as a prompt, `after` an end token that is there already.

        It is encoded behind it: some end tokens swallow the blanks that follow, and some tokenizers begin every text
        with a blank. CannotContinue where that end token is no token of its own there.
        """
        tokens = self.template.encode_text(after + text)
        if after:
            if not tokens.size or int(tokens[0]) != self.template.added[after][0]:
                raise CannotContinue(f"its tokenizer does not begin {after + text!r:.80} with the end token")
            tokens = tokens[1:]
        return Prompt(text, tokens, self.opens_thinking(text))

    def _stand_in(self, last: Message) -> list[Message]:
        answer: Message = {"role": "assistant", "content": _ANSWER}
        if last.get("tool_calls"):
            # Names and ids stay: some templates look them up when they render a tool's result.
            answer["tool_calls"] = [
                {**call, "function": {"name": call["function"]["name"], "arguments": {"x": _ANSWER}}}
                for call in self.template.prepare(last)["tool_calls"]
            ]
        return [{"role": "user", "content": _QUESTION}, answer]

    def _after(self, history: list[Message], ready: Sequence[Message], setting: Setting) -> str:
        """What the template writes from the end token of the history's last turn on."""
        text = self.template.text_of_prepared(
            [*history, *ready], setting.prepared, generation=True, extra=setting.extra
        )
        at = text.rfind(_ANSWER)
        if at < 0:
            raise CannotContinue("it does not render the assistant's earlier turns")
        tail = text[at + len(_ANSWER) :]
        if _QUESTION in tail:
            raise CannotContinue("it writes earlier messages after the assistant's turn")
        found = [(tail.find(text), text) for text in self._end_texts if text in tail]
        if not found:
            raise CannotContinue(f"it closes an assistant's turn with {tail!r:.60}, which holds no end token")
        return tail[min(found)[0] :]

    def _through_end(self, text: str) -> str:
        at = text.rfind(self.end_text)
        if at < 0:
            raise ContractError(f"the chat template closes a turn without its end token {self.end_text!r}")
        return text[: at + len(self.end_text)]

    def _find_end(self) -> None:
        history: list[Message] = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        text = self.template.text_of_prepared(history, None, generation=False)
        closing = text[text.rfind(_ANSWER) + len(_ANSWER) :] if _ANSWER in text else ""
        texts = sorted(self.template.added, key=len, reverse=True)
        end = next(
            (t for t in texts if closing.startswith(t) and self.template.added[t][0] in self.template.control_ids), None
        )
        if end is None:
            raise CannotContinue(
                f"it closes an assistant's turn with {closing!r:.60}, which is no end token of the tokenizer"
            )
        self.end_text = end
        self.end_id = self.template.added[end][0]
        self.end_ids = self.template.end_ids | {self.end_id}
        self._end_texts = [t for t, (i, _) in self.template.added.items() if i in self.end_ids]

    def _prove(self) -> None:
        """Compare the difference under a stand-in history with the one under longer histories, for several kinds of
        turns.

        A template that only fails with tools' results (DeepSeek-R1-Distill's) starts a new trajectory there.
        """
        for new in _CONTINUATIONS:
            try:
                self._prove_continuation(new)
            except CannotContinue as error:
                if not _has_results(new):
                    raise
                self._results_reason = str(error)

    def _prove_continuation(self, new: Sequence[Message]) -> None:
        ready = [self.template.prepare(message) for message in new]
        for setting in (self.setting(), self.setting(_TOOLS)):
            for last in _LAST_TURNS:
                if "tool_calls" in last or not _has_results(new):
                    self._prove_one(last, ready, setting)

    def _prove_one(self, last: Message, ready: list[Message], setting: Setting) -> None:
        stand_in = self._stand_in(last)
        try:
            expected = self._after(stand_in, ready, setting)
        except ContractError:
            return  # the template refuses this shape, and will say so to whoever sends it
        for history in _histories():
            try:
                found = self._after([*history, stand_in[-1]], ready, setting)
            except ContractError:
                continue
            if found != expected:
                raise CannotContinue(
                    f"what it writes after a turn depends on the history: {found!r:.80} or {expected!r:.80}"
                )
        end = next(text for text in self._end_texts if expected.startswith(text))
        self.prompt(expected[len(end) :], after=end)


def _has_results(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "tool" for message in messages)


def _key(*parts: Any) -> bytes | None:
    # Of all serialisers this one keeps every difference between plain values; the bytes never leave the process.
    try:
        return marshal.dumps(parts, 2)
    except ValueError:
        return None


def _call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"x": 1}}}


_LAST_TURNS: tuple[Message, ...] = (
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [_call("f", "call00001")]},
    {"role": "assistant", "content": "", "tool_calls": [_call("f", "call00001"), _call("g", "call00002")]},
)
_RESULT: Message = {"role": "tool", "content": "r1", "tool_call_id": "call00001"}
_CONTINUATIONS: tuple[list[Message], ...] = (
    [],
    [{"role": "user", "content": "u1"}],
    [_RESULT],
    [_RESULT, {"role": "tool", "content": "r2", "tool_call_id": "call00002"}],
    [_RESULT, {"role": "user", "content": "u1"}],
    [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "u2"}],
)
_TOOLS = (
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    },
)


def _histories() -> Iterator[list[Message]]:
    system: Message = {"role": "system", "content": "s"}
    user: Message = {"role": "user", "content": "u0"}
    answer: Message = {"role": "assistant", "content": "a0"}
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [_call("f", "call00000")]}
    result: Message = {"role": "tool", "content": "r0", "tool_call_id": "call00000"}
    yield [system, user]
    yield [user, answer, user]
    yield [system, user, calls, result]
    yield [system, user, calls, result, answer, user]
