r"""Residue classes: `x \equiv 1, 3 \pmod{8}`, `2 (mod 5)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentrl.reward.symbolic.arithmetic import number
from agentrl.reward.symbolic.tokens import Token, Unreadable, tokenize
from agentrl.reward.symbolic.values import Listing, Named, Residues, Value

LARGEST_MODULUS = 10**6
_CLASS = re.compile(
    r"(?P<left>.+?)(?:,?\s*\\pmod\s*(?:\{(?P<braced>[^{}]+)\}|(?P<bare>\S+))"
    r"|\(\s*(?:\\bmod|\\mod|\\(?:text|mathrm)\{\s*mod\s*\}|mod)[\s~]*(?P<bracketed>[^()]+)\))"
)
_MOD = re.compile(r"\\b?mod(?![a-z])")
_EQUIV = re.compile(r"\\equiv|≡")

Answer = Callable[[list[Token]], Value]
"""Reads tokens as a value or a list of values."""


def residues(text: str, answer: Answer) -> Residues | None:
    """The classes that `text` names; None where it names none, Unreadable where it cannot be worked out."""
    found = _CLASS.fullmatch(_MOD.sub(r"\\pmod", text) if _EQUIV.search(text) else text)
    if found is None:
        return None
    modulus = _whole(answer(tokenize(found["braced"] or found["bare"] or found["bracketed"])), "a modulus")
    if not 1 <= modulus <= LARGEST_MODULUS:
        raise Unreadable(f"the modulus {modulus}: 1 to {LARGEST_MODULUS} are read")
    name, *rest = _EQUIV.split(found["left"], maxsplit=1)
    listed = answer(tokenize(rest[0] if rest else name))
    items: Sequence[Value] = listed.items if isinstance(listed, Listing) else (listed,)
    classes = {_whole(item, "a residue") % modulus for item in items}
    return _smallest(name.strip().strip("$ ") if rest else "", classes, modulus)


def _whole(value: Value, what: str) -> int:
    value = value.value if isinstance(value, Named) else value
    found = number(value)
    if not found.is_Integer:
        raise Unreadable(f"{what} that is no whole number: {found}")
    return int(found)


def _smallest(name: str, classes: set[int], modulus: int) -> Residues:
    """1 and 4 modulo 6 are 1 modulo 3: every set of classes has one form."""
    for divisor in range(1, modulus):
        if modulus % divisor == 0:
            fewer = {residue % divisor for residue in classes}
            if len(fewer) * (modulus // divisor) == len(classes):
                return Residues(name, frozenset(fewer), divisor)
    return Residues(name, frozenset(classes), modulus)
