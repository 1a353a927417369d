"""Tokens of a growing conversation in one buffer, so that a turn costs what it adds and not what is there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from agentrl.types import Int32Array


class Tape:
    """A buffer that is only ever written to behind its end: what was handed out stays as it is."""

    def __init__(self, room: int) -> None:
        self._buffer = np.empty(room, np.int32)
        self._end = 0

    def begin(self, tokens: Int32Array) -> Int32Array:
        """Write the first tokens, and return them."""
        self._buffer[: tokens.size] = tokens
        self._end = int(tokens.size)
        return self._view(self._end)

    def write(self, at: int, tokens: Int32Array) -> Int32Array | None:
        """Everything up to `at` with `tokens` after it; None where other tokens were written there already."""
        end = at + int(tokens.size)
        if at != self._end:
            return None
        if end > self._buffer.size:
            grown = np.empty(2 * end, np.int32)
            grown[:at] = self._buffer[:at]
            self._buffer = grown
        self._buffer[at:end] = tokens
        self._end = end
        return self._view(end)

    def _view(self, end: int) -> Int32Array:
        view = self._buffer[:end]
        view.flags.writeable = False
        return view


class Strip(NamedTuple):
    """`tokens` are the beginning of `tape`."""

    tape: Tape
    tokens: Int32Array

    def then(self, new: Int32Array) -> Strip:
        """These tokens and `new` after them: on the same tape where its end is free, else on a copy."""
        written = self.tape.write(int(self.tokens.size), new)
        if written is not None:
            return Strip(self.tape, written)
        return strip(np.concatenate((self.tokens, new)))


def strip(tokens: Int32Array) -> Strip:
    """Tokens on a tape of their own."""
    tape = Tape(2 * int(tokens.size) + 256)
    return Strip(tape, tape.begin(tokens))
