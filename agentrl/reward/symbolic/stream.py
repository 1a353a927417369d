"""A list of tokens that is read from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.reward.symbolic.tokens import Token, Unreadable

END = Token("end", "")


class Stream:
    """`at` is the place of the next token."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = list(tokens)
        self.at = 0

    @property
    def here(self) -> Token:
        """The next token; END after the last."""
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def ahead(self, by: int = 1) -> Token:
        """The token `by` places on."""
        return self.tokens[self.at + by] if self.at + by < len(self.tokens) else END

    def take(self) -> Token:
        """The next token, used up."""
        token = self.here
        if token is END:
            raise Unreadable("the answer ends too early")
        self.at += 1
        return token

    def is_op(self, *texts: str) -> bool:
        """Whether an operator is next, one of `texts`."""
        return self.here.kind == "op" and self.here.text in texts

    def is_cmd(self, *texts: str) -> bool:
        """Whether a command is next, one of `texts`."""
        return self.here.kind == "cmd" and self.here.text in texts

    def expect(self, text: str) -> None:
        """Use up this operator; Unreadable where it is not next."""
        if not self.is_op(text):
            raise Unreadable(f"expected {text!r}, found {self.here.text!r}")
        self.at += 1
