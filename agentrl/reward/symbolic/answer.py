"""From an answer's text to its value: lists, names, relations, units and words around the expressions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import sympy

from agentrl.reward.symbolic.expression import Parser
from agentrl.reward.symbolic.numeric import identical
from agentrl.reward.symbolic.residues import residues
from agentrl.reward.symbolic.special import PHRASES, choice, in_words, special
from agentrl.reward.symbolic.spelling import visible
from agentrl.reward.symbolic.tokens import LONGEST, Token, Unreadable, tokenize
from agentrl.reward.symbolic.units import split_unit
from agentrl.reward.symbolic.values import (
    Bracket,
    Equation,
    Expr,
    Inequality,
    Listing,
    Named,
    Ratio,
    RealSet,
    Scalar,
    Value,
)
from agentrl.reward.symbolic.words import NOT_AN_ANSWER, SCALES

MOST_SIGNS = 3
"""± in one value: more would be too many combinations."""
MOST_ITEMS = 64

_RELATIONS = {"=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in", "approx": "~"}


def readings(text: str) -> list[Value]:
    """What `text` can mean: one value, or two where `1,234` is a number or a list; Unreadable where it has none."""
    if len(text) > LONGEST:  # before any search through it
        raise Unreadable(f"{len(text)} characters, at most {LONGEST} are read")
    text = _trimmed(visible(text))
    if not text:
        raise Unreadable("nothing is written")
    if (found := choice(text, readings) or special(text) or residues(text, _answer)) is not None:
        return [found]
    first = _answer(tokenize(text))
    if not re.search(r"\d,\d{3}", text):
        return [first]
    second = _answer(tokenize(text, grouped=False))
    return [first] if first == second else [first, second]


def _trimmed(text: str) -> str:
    text = text.strip()
    while True:
        before = text
        for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")):
            inside = text[len(left) : len(text) - len(right)]
            if (
                len(text) > len(left) + len(right)
                and text.startswith(left)
                and text.endswith(right)
                and left not in inside
            ):
                text = inside.strip()
        if text.endswith((".", ";", ",")) and not text.endswith(("\\,", "\\;", "..")):
            text = re.sub(r"(?<!\\)\\$", "", text[:-1].rstrip()).rstrip()
        if text == before:
            return text


def _answer(tokens: list[Token]) -> Value:
    clauses = _split(tokens)
    if len(clauses) == 1:
        return _item(clauses[0][1])
    if len(clauses) > MOST_ITEMS:
        raise Unreadable(f"a list of more than {MOST_ITEMS} values")
    values = [_item(clause) for _, clause in clauses]
    links = {link for link, _ in clauses[1:]}
    if len(links) == 1 and links <= {"or", "and"} and (found := _one_set(values, links == {"or"})) is not None:
        return found
    return Listing(tuple(itertools.chain.from_iterable(v.items if isinstance(v, Listing) else (v,) for v in values)))


def _one_set(values: Sequence[Value], union: bool) -> RealSet | None:
    """The set that conditions on one variable leave: `x < 1 or x = 4`."""
    sets, names = [], set()
    for value in values:
        if isinstance(value, RealSet) and value.name:
            sets.append(value.set)
            names.add(value.name)
        elif isinstance(value, Named) and isinstance(value.value, Scalar):
            sets.append(sympy.FiniteSet(value.value.expr))
            names.add(value.name)
        else:
            return None
    if len(names) != 1 or not any(isinstance(value, RealSet) for value in values):
        return None
    return RealSet(sympy.Union(*sets) if union else sympy.Intersection(*sets), names.pop())


def _split(tokens: Sequence[Token]) -> list[tuple[str, list[Token]]]:
    """The clauses between top-level commas, "or" and "and", each with the link before it."""
    found: list[tuple[str, list[Token]]] = [("", [])]
    depth = 0
    for token in tokens:
        if token.kind == "op" and token.text in {"(", "[", "{", "\\{"}:
            depth += 1
        elif token.kind == "op" and token.text in {")", "]", "}", "\\}"}:
            depth -= 1
        elif token.kind == "cmd" and token.text.startswith(("begin:", "end:")):
            depth += 1 if token.text.startswith("begin:") else -1
        link = _link(token) if depth == 0 else ""
        if not link:
            found[-1][1].append(token)
        elif found[-1][1]:
            found.append((link, []))
        elif found[-1][0] == "," and link in {"or", "and"}:
            found[-1] = (link, [])  # ", and"
        else:
            raise Unreadable("an empty place in a list")
    if not found[-1][1]:
        raise Unreadable("an empty place in a list")
    return found


def _link(token: Token) -> str:
    if token.kind == "op" and token.text in {",", ";", "&"}:
        return "and" if token.text == "&" else ","
    return token.text.lower() if token.kind == "word" and token.text.lower() in {"or", "and"} else ""


def _item(tokens: list[Token]) -> Value:
    """One clause; several values where it has a ±."""
    signs = [token.text for token in tokens if token.kind == "cmd" and token.text in {"pm", "mp"}]
    if not signs:
        return _clause(tokens, ())
    if len(signs) > MOST_SIGNS:
        raise Unreadable(f"more than {MOST_SIGNS} plus-minus signs")
    # With a ∓ the signs go together; otherwise each ± is its own choice.
    choices = (
        [(sign,) * len(signs) for sign in (1, -1)] if "mp" in signs else itertools.product((1, -1), repeat=len(signs))
    )
    values = tuple(_clause(tokens, tuple(choice)) for choice in choices)
    if any(token.text == "ne" for token in tokens):  # `x \\ne \\pm 1` leaves out both
        sets = [value for value in values if isinstance(value, RealSet)]
        return RealSet(sympy.Intersection(*(value.set for value in sets)), sets[0].name if sets else "")
    return Listing(values)


def _clause(tokens: list[Token], signs: tuple[int, ...]) -> Value:
    if (condition := _set_builder(tokens)) is not None:
        return condition
    pieces, relations = _relations(tokens)
    if not relations:
        return _value(tokens, signs)
    if "in" in relations:
        if relations != ["in"] or _name(pieces[0]) is None:
            raise Unreadable("a membership that is no answer")
        return Named(_name(pieces[0]) or "", _value(pieces[1], signs), None)
    if set(relations) <= {"=", "~"}:
        return _equation(pieces, relations, signs)
    return _inequality(pieces, relations, signs)


def _set_builder(tokens: list[Token]) -> Value | None:
    """The solutions of the condition in `\\{x \\mid x > 2\\}`; None where it is no such set."""
    texts = [token.text for token in tokens]
    if len(tokens) < 6 or (texts[0], texts[-1]) != ("\\{", "\\}") or tokens[1].kind != "sym":
        return None
    bar = next((at for at in (2, 4) if texts[at] in {"|", ":"}), None)
    if bar is None or (bar == 4 and texts[2:4] != ["in", "set:R"]):
        return None
    found = _answer(tokens[bar + 1 : -1])
    if not isinstance(found, RealSet) or found.name != texts[1]:
        raise Unreadable("a set whose condition is not understood")
    return RealSet(found.set)


def _relations(tokens: Sequence[Token]) -> tuple[list[list[Token]], list[str]]:
    pieces: list[list[Token]] = [[]]
    relations: list[str] = []
    depth = 0
    for token in tokens:
        depth += token.text in {"(", "[", "{", "\\{"} and token.kind == "op"
        depth -= token.text in {")", "]", "}", "\\}"} and token.kind == "op"
        if depth == 0 and token.kind in {"op", "cmd"} and token.text in _RELATIONS:
            relations.append(_RELATIONS[token.text])
            pieces.append([])
        else:
            pieces[-1].append(token)
    if relations and not all(pieces[1:]):
        raise Unreadable("a relation without a side")
    return pieces, relations


def _equation(pieces: list[list[Token]], relations: list[str], signs: tuple[int, ...]) -> Value:
    name = _name(pieces[0])
    if name is None and len(pieces) == 2 and relations == ["="] and (name := _name(pieces[1])) is not None:
        pieces = pieces[::-1]
    if not pieces[0]:  # `= 5`
        pieces, relations, name = pieces[1:], relations[1:], None
    sides = pieces if name is None else pieces[1:]
    links = relations if name is None else relations[1:]
    # `\sqrt{2} \approx 1.41`: what is exact stands first.
    while links and links[-1] == "~":
        sides, links = sides[:-1], links[:-1]
    values = [_value(side, signs) for side in sides]
    value = values[-1]
    for earlier in values[:-1]:
        if isinstance(earlier, Scalar) and isinstance(value, Scalar):
            if identical(earlier.expr, value.expr):
                continue
            if name is None and len(values) == 2 and (earlier.expr - value.expr).free_symbols:
                return Equation(earlier.expr - value.expr)
        raise Unreadable("a chain of equalities that does not hold")
    if name is None:
        return value
    symbol = _symbol(pieces[0])
    is_expr = isinstance(value, Scalar) and symbol is not None and not value.unit
    return Named(name, value, symbol - value.expr if is_expr and isinstance(value, Scalar) else None)


def _inequality(pieces: list[list[Token]], relations: list[str], signs: tuple[int, ...]) -> Value:
    sides = [_number(_value(piece, signs)) for piece in pieces]
    links = list(zip(sides, relations, sides[1:], strict=False))
    symbols = sorted(set().union(*(side.free_symbols for side in sides)), key=str)
    if len(symbols) == 1:
        found = [_solutions(left, relation, right, symbols[0]) for left, relation, right in links]
        return RealSet(sympy.Intersection(*found) if len(found) > 1 else found[0], str(symbols[0]))
    if not symbols or any(relation in {"=", "~", "!="} for relation in relations):
        raise Unreadable("an inequality without a variable")
    parts = [(a - b if relation in {"<", "<="} else b - a, relation in {"<", ">"}) for a, relation, b in links]
    return Inequality(tuple(parts))


def _solutions(left: Expr, relation: str, right: Expr, symbol: Expr) -> Expr:
    if right == symbol:
        left, right = right, left
        relation = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(relation, relation)
    if left == symbol and not right.free_symbols:
        if right.is_extended_real is not True:
            raise Unreadable("an inequality with a bound that is not real")
        oo = sympy.oo
        return {
            "<": lambda: sympy.Interval.open(-oo, right),
            "<=": lambda: sympy.Interval(-oo, right),
            ">": lambda: sympy.Interval.open(right, oo),
            ">=": lambda: sympy.Interval(right, oo),
            "!=": lambda: sympy.Complement(sympy.S.Reals, sympy.FiniteSet(right)),
            "=": lambda: sympy.FiniteSet(right),
        }[relation]()
    makers = {"<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "!=": sympy.Ne, "=": sympy.Eq}
    real = sympy.Symbol("x", real=True)
    try:
        # `.subs` may already decide it.
        condition = makers[relation](left.subs(symbol, real), right.subs(symbol, real))
        return sympy.solveset(condition, real, sympy.S.Reals)
    except (NotImplementedError, TypeError, KeyError) as error:
        raise Unreadable(f"an inequality that cannot be solved: {error}") from error


def _number(value: Value) -> Expr:
    if not isinstance(value, Scalar):
        raise Unreadable("an inequality of what is no number")
    return value.expr


def _name(tokens: Sequence[Token]) -> str | None:
    """What `x`, `f(x)`, `AB`, `\\angle A`, `S_{10}`, `|AB|` or `\\text{Area}` name; None where it is no name."""
    if not tokens or len(tokens) > 24:
        return None
    text = "".join(f"{token.text} " if token.kind == "word" else token.text for token in tokens).strip()
    letters = r"(?:[A-Z]{1,5}|[a-z]|" + "|".join(t.text for t in tokens if t.kind == "cmd" and t.text.isalpha()) + ")"
    letters = letters.replace("|)", ")")
    index = r"(?:_(?:\{[\w,+-]+\}|\w))?'*"
    if all(token.kind == "word" for token in tokens):
        return text.lower()
    if text.startswith(("e=", "i=")) or text in {"e", "i", "pi", "infty"}:
        return None
    if re.fullmatch(r"frac\{d[a-z]?\}\{d[a-z]\}|[A-Za-z]\^\{-1\}\(\w\)|(?:Pr?|E|Var ?)[(\[][^()\[\]]{1,30}[)\]]", text):
        return text
    words = r"(?:(?:m?angle|triangle|overline|vec|hat|m)\{?)?"
    pattern = rf"\(\w(?:,\w)+\)|{words}{letters}{index}\}}?(?:\((?:-?[\w]|\d+)(?:,-?(?:\w|\d+))*\))?|\|{letters}\|"
    return text if re.fullmatch(pattern, text) else None


def _symbol(tokens: Sequence[Token]) -> Expr | None:
    parser = Parser(tokens)
    if tokens[0].kind != "sym" and tokens[0].kind != "cmd":
        return None
    try:
        found = parser.sum()
    except Unreadable:
        return None
    return found if parser.at == len(parser.tokens) and isinstance(found, sympy.Symbol) else None


def _value(tokens: list[Token], signs: tuple[int, ...]) -> Value:
    """A value with its unit, or words, or a ratio."""
    if not tokens:
        raise Unreadable("nothing is written")
    if tokens and all(token.kind == "word" for token in tokens):
        text = " ".join(token.text.lower() for token in tokens)
        if len(tokens) == 1 and text not in NOT_AN_ANSWER and text not in SCALES:
            return in_words(PHRASES.get(text, text))
        raise Unreadable(f"the words {text!r}")
    tokens, unit, scale = split_unit(tokens)
    if [token.kind for token in tokens] == ["num", "word", "num"] and tokens[1].text == "to":  # odds
        tokens = [tokens[0], Token("op", ":"), tokens[2]]
    if any(token.kind == "op" and token.text == ":" for token in tokens):
        return _ratio(tokens, signs)
    parser = Parser(tokens, signs)
    value = parser.whole()
    if parser.at != len(parser.tokens):
        raise Unreadable(f"{parser.here.text!r} after the value")
    if isinstance(value, Scalar):
        if unit == "remark" and value.expr.free_symbols:
            raise Unreadable("words after a formula")
        expr = value.expr if scale == 1 else value.expr * scale
        if expr.has(sympy.nan, sympy.zoo):
            raise Unreadable("what has no value")
        return Scalar(expr / 100 if unit == "percent" else expr, unit)
    if scale != 1 or unit not in {"", "remark", "degree"}:
        if isinstance(value, Bracket):
            return value
        raise Unreadable("a unit of what is no number")
    return value


def _ratio(tokens: list[Token], signs: tuple[int, ...]) -> Ratio:
    pieces: list[list[Token]] = [[]]
    for token in tokens:
        if token.kind == "op" and token.text == ":":
            pieces.append([])
        else:
            pieces[-1].append(token)
    return Ratio(tuple(_number(_value(piece, signs)) for piece in pieces))
