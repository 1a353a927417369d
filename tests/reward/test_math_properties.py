"""Properties of the comparison: a value rewritten stays equal, a value perturbed does not."""

from __future__ import annotations

from fractions import Fraction

import pytest
import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.reward.symbolic.check import check

QUICK = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FRACTIONS = st.fractions(min_value=-500, max_value=500, max_denominator=60)
SMALL = st.integers(-9, 9)


def equal(a: str, b: str) -> bool:
    forth, back = check(a, b, 0.0, False), check(b, a, 0.0, False)
    assert (forth[0] == "equal") == (back[0] == "equal"), (a, b, forth, back)
    return forth[0] == "equal"


def forms(value: Fraction) -> list[str]:
    """Ways in which people write a rational number."""
    p, q, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    found = [
        f"{sign}\\frac{{{p}}}{{{q}}}",
        f"{sign}{p}/{q}",
        f"\\dfrac{{{sign}{p}}}{{{q}}}",
        f"{sign}{{{p} \\over {q}}}",
    ]
    found += [f"x = {sign}\\frac{{{p}}}{{{q}}}", f"${sign}{p}/{q}$", f"\\frac{{{sign}{3 * p}}}{{{3 * q}}}"]
    whole, part = divmod(p, q)
    if q == 1:
        found += [f"{sign}{p}", f"{sign}{p}.0", f"\\text{{{sign}{p}}}", f"{sign}{p:,}", f"{sign}{p}\\text{{ cm}}"]
    elif whole:
        found += [f"{sign}{whole}\\frac{{{part}}}{{{q}}}", f"{sign}{whole} {part}/{q}"]
    if all(prime in (2, 5) for prime in sympy.factorint(q)):
        found += [f"{value.numerator / q:.12f}".rstrip("0") or "0", f"{float(100 * value):.12f}\\%"]
    return found


@QUICK
@given(FRACTIONS, st.data())
def test_all_ways_to_write_a_rational_are_equal(value: Fraction, data: st.DataObject) -> None:
    a, b = (data.draw(st.sampled_from(forms(value))) for _ in range(2))
    assert equal(a, b), (a, b)


@QUICK
@given(FRACTIONS, st.integers(1, 40), st.data())
def test_no_way_to_write_another_rational_is_equal(value: Fraction, places: int, data: st.DataObject) -> None:
    a = data.draw(st.sampled_from(forms(value)))
    b = data.draw(st.sampled_from(forms(value + Fraction(1, 10**places)) if places < 9 else [f"{a}+10^{{-{places}}}"]))
    if "text" in a or "%" in a:
        a = a.replace("\\text{ cm}", "").replace("\\%", " \\cdot \\frac{1}{100}")
        b = b if places < 9 else f"{a}+10^{{-{places}}}"
    assert not equal(a, b), (a, b)


def _polynomial(coefficients: list[int]) -> sympy.Expr:
    x = sympy.Symbol("x")
    return sum((c * x**i for i, c in enumerate(coefficients)), sympy.Integer(0))


@QUICK
@given(st.lists(SMALL, min_size=2, max_size=4), st.lists(SMALL, min_size=2, max_size=3))
def test_sympy_rewritings_of_a_function_are_equal(first: list[int], second: list[int]) -> None:
    top, bottom = _polynomial(first), _polynomial(second)
    expr = top * (bottom + 1) + sympy.sin(sympy.Symbol("x")) ** 2
    for rewritten in (sympy.expand(expr), sympy.factor(expr), expr.rewrite(sympy.cos), sympy.expand_trig(expr)):
        assert equal(sympy.latex(expr), sympy.latex(rewritten)), (expr, rewritten)
    assert not equal(sympy.latex(expr), sympy.latex(expr + sympy.Rational(1, 10**30)))
    assert not equal(sympy.latex(expr), sympy.latex(expr + sympy.Symbol("x") / 10**6))


@QUICK
@given(st.integers(2, 60), st.integers(2, 60), SMALL)
def test_roots_and_their_rewritings(a: int, b: int, c: int) -> None:
    assert equal(rf"\sqrt{{{a}}}\sqrt{{{b}}}+{c}", rf"\sqrt{{{a * b}}}+{c}")
    assert equal(rf"\frac{{1}}{{\sqrt{{{a}}}+1}}", rf"\frac{{\sqrt{{{a}}}-1}}{{{a - 1}}}")
    assert equal(rf"\sqrt[3]{{{a}}}", rf"{a}^{{1/3}}")
    assert equal(rf"\sqrt{{{a}}} \approx 1.5", sympy.latex(sympy.sqrt(a)))
    assert not equal(rf"\sqrt{{{a}}}", rf"\sqrt{{{a}}}+10^{{-60}}")
    assert equal(rf"\log_{{{a}}} {b}", rf"\frac{{\ln {b}}}{{\ln {a}}}")


@QUICK
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True), st.randoms())
def test_order_counts_in_brackets_alone(items: list[int], random: object) -> None:
    turned = items[1:] + items[:1]
    text, other = (", ".join(map(str, order)) for order in (items, turned))
    assert equal(text, other)
    assert equal(f"\\{{{text}\\}}", f"\\{{{other}\\}}")
    assert equal(f"\\{{{text}\\}}", other)
    assert equal(f"x = {text}", " or ".join(f"x={item}" for item in turned))
    assert not equal(f"({text})", f"({other})")
    assert not equal(f"({text})", text)
    assert not equal(f"({text})", f"\\{{{text}\\}}")
    assert not equal(text, f"{text}, {items[0] + 200}")


@QUICK
@given(SMALL, st.integers(1, 9), st.sampled_from(["()", "[]", "[)", "(]"]), st.sampled_from(["()", "[]", "[)", "(]"]))
def test_intervals_are_inequalities(low: int, length: int, one: str, two: str) -> None:
    def interval(ends: str) -> str:
        return f"{ends[0]}{low}, {low + length}{ends[1]}"

    def chain(ends: str) -> str:
        left, right = "<" if ends[0] == "(" else r"\le", "<" if ends[1] == ")" else r"\leq"
        return f"{low} {left} x {right} {low + length}"

    assert equal(interval(one), chain(one))
    assert equal(chain(one), chain(two)) == (one == two)
    assert equal(interval(one), interval(two)) == (one == two)
    union = rf"(-\infty, {low}) \cup ({low}, \infty)"
    assert equal(union, rf"x \neq {low}")
    assert not equal(union, rf"x \neq {low + 1}")


@QUICK
@given(SMALL, SMALL, SMALL, st.integers(1, 9))
def test_equations_are_equal_up_to_a_factor(a: int, b: int, c: int, factor: int) -> None:
    if a == 0 or b == 0:
        return
    line = f"{a}x + {b}y = {c}".replace("+ -", "- ")
    scaled = f"{-factor * a}x + {-factor * b}y + {factor * c} = 0".replace("+ -", "- ")
    assert equal(line, scaled)
    assert equal(line, rf"y = \frac{{{c} - {a}x}}{{{b}}}".replace("- -", "+ "))
    assert not equal(line, f"{a}x + {b}y = {c + 1}".replace("+ -", "- "))
    assert not equal(line, f"{a}x + {b}y".replace("+ -", "- "))


PIECES = [*"0123456789.,;:+-*/^_(){}[]|<>=!%$&' xyabei\\~"]
PIECES += [r"\frac", r"\sqrt", r"\{", r"\}", r"\text{", r"\left", r"\pm", r"\cup", r"\infty", r"\le"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_no_text_raises(text: str) -> None:
    reason, _ = check(text, text, 0.0, False)
    assert reason in {"equal", "gold_unparseable"}, text
    assert check("7", text, 0.0, False)[0] in {"equal", "different", "gold_unparseable"}


@pytest.mark.parametrize("depth", [50, 500, 1500])
def test_deep_nesting_is_refused_or_read(depth: int) -> None:
    for text in (
        "(" * depth + "1" + ")" * depth,
        r"\sqrt{" * (depth // 4) + "x" + "}" * (depth // 4),
        "-" * depth + "1",
    ):
        assert check(text[:3900], "1", 0.0, False)[0] in {"equal", "different", "answer_unparseable"}
