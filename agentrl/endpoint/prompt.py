"""From a request to its prompt: where in the session's record it goes on, and what is new to show."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.parse import Format
from agentrl.endpoint.record import Line, Place, Recorder
from agentrl.endpoint.render import CannotContinue, Prompt, Renderer, Setting
from agentrl.endpoint.request import ANY, ChatRequest, Refused
from agentrl.types import SplitReason

_RAW = Setting(extra={"raw": True})  # text completions never go on from a chat


_CLOSED = "\n</think>\n\n"


class Prompter:
    """Renders a session's requests against what it recorded."""

    def __init__(
        self, renderer: Renderer, recorder: Recorder, options: EndpointOptions, form: Format, vocab_size: int
    ) -> None:
        self._renderer = renderer
        self._recorder = recorder
        self._history = options.history
        self._form = form
        self._vocab_size = vocab_size
        self._setting = renderer.setting()

    def prompt(self, request: ChatRequest) -> tuple[Place, Prompt]:
        """Where the request goes on and what is shown; ContractError where it cannot be rendered."""
        if request.prompt is not None:
            return self._text(request.prompt, request.agent)
        place, prompt = self._chat(self._recorder.locate(request.messages, self._setting_of(request), request.agent))
        if request.force is not None:
            called = opening(self._form, request.force, thinking=prompt.thinking)
            # A name may look like a control token; what the format itself writes may not be marked.
            marked = str(self._renderer.template.marked(request.force))
            return place, self._opened(prompt, called, opening(self._form, marked, thinking=prompt.thinking))
        if request.sampling.grammar is not None and prompt.thinking:
            # A grammar holds from the first token on, so reasoning that the template opened ends before it.
            return place, self._opened(prompt, _CLOSED, _CLOSED)
        return place, prompt

    def _setting_of(self, request: ChatRequest) -> Setting:
        known = self._setting
        if known.tools != request.tools or known.extra != request.template:
            self._setting = self._renderer.setting(request.tools, request.template)
        return self._setting

    def _text(self, prompt: str | Sequence[int], agent: str) -> tuple[Place, Prompt]:
        template = self._renderer.template
        if isinstance(prompt, str):
            place, known = self._recorder.locate_text(prompt, _RAW, agent)
            text = prompt[known:]
            return place, Prompt(text, template.encode_raw(text, bos=not known), False)
        tokens = np.array(prompt, np.int32)
        if int(tokens.max()) >= self._vocab_size:
            raise Refused(f"prompt has token {int(tokens.max())} of a vocabulary of {self._vocab_size}", "prompt")
        place, known = self._recorder.locate_text(tokens, _RAW, agent)
        return place, Prompt(template.decode(tokens[known:]), tokens[known:], False)

    def _chat(self, place: Place) -> tuple[Place, Prompt]:
        if self._renderer.reason is not None:
            place = place.restarted(SplitReason.TEMPLATE)
        line = place.line
        if line is None:
            return place, self._renderer.start(place.new, place.setting)
        if self._history == "template":
            return self._rewritten(place, line)
        turn = line.turns[place.turn]
        last = line.known[turn.messages - 1]
        try:
            ended_by = int(line.tokens[turn.tokens - 1])
            return place, self._renderer.extend(last, place.new, place.setting, ended_by=ended_by)
        except CannotContinue:
            place = place.restarted(SplitReason.TEMPLATE)
            return place, self._renderer.start(place.new, place.setting)

    def _rewritten(self, place: Place, line: Line) -> tuple[Place, Prompt]:
        """Render as for a fresh chat, with what was sampled as it was written; go on only where that keeps every
        token."""
        at = line.turns[place.turn].messages
        history = [
            {"role": "assistant", "content": line.raw[i]} if i in line.raw else message
            for i, message in enumerate(line.known[:at])
        ]
        text = self._renderer.full_text([*history, *place.new], place.setting, generation=True)
        so_far = "".join(line.texts[: 2 * place.turn + 2])
        if text.startswith(so_far):
            ended_by = self._renderer.end_text_of(int(line.tokens[line.turns[place.turn].tokens - 1]))
            return place, self._renderer.prompt(text[len(so_far) :], after=ended_by)
        return place.restarted(SplitReason.TEMPLATE), self._renderer.prompt(text)

    def _opened(self, prompt: Prompt, opened: str, shown: str) -> Prompt:
        """The prompt with the beginning of the answer, which is shown and not sampled: so the log-probs of the rest
        are the model's own, as a grammar's would not be."""
        tokens = np.concatenate((prompt.tokens, self._renderer.template.encode_text(shown)))
        return Prompt(prompt.text + shown, tokens, prompt.thinking, opened)


def opening(form: Format, name: str, *, thinking: bool) -> str:
    """How a call of `name` (or of `ANY` function) begins, up to where the model's part starts.

    It ends where tokenizers end a token. Refused where the model has no format for calls.
    """
    if form is Format.NONE:
        raise Refused('tool_choice cannot force a call: endpoint.tool_format is "none"', "tool_choice")
    quoted = json.dumps(name, ensure_ascii=False)
    if form is Format.QWEN3_CODER:
        call = "<tool_call>\n<function=" if name == ANY else f"<tool_call>\n<function={name}>\n"
    else:
        key = "parameters" if form is Format.LLAMA3_JSON else "arguments"
        call = '{"name": "' if name == ANY else f'{{"name": {quoted}, "{key}":'
        call = f"<tool_call>\n{call}" if form is Format.HERMES else call
    return _CLOSED + call if thinking else call
