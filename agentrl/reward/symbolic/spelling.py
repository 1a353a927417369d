"""One spelling for what an answer's text can spell in many ways: unicode, spaces of LaTeX, colours, fonts, brackets."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from agentrl.reward.symbolic.words import UNICODE

_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺⁽⁾ⁿˣ", "0123456789-+()nx")
_INDICES = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_WIDE = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff\u2155-\u215e\u2150\u2151\u2152\u2103\u2109]")
"""Full-width and mathematical letters and digits, and the fractions: what Unicode calls them is what they mean."""

_CHOICES = tuple(
    re.compile(form)
    for form in (
        r"(?:\{\}\s*|(?<![\w)\]}])(?<![\w)\]}] ))[_^]\s*(?:\{(\w+)\}|(\w))\s*([CP])\s*_\s*(?:\{(\w+)\}|(\w))",
        r"(?<![\w\\])(\d+)()\s*([CP])\s*(\d+)()(?!\w)",
        r"(?<![\w\\])(?:n?(C)|nCr|n(P)r?|\\binom)()\(([^(),{}]+),([^(),{}]+)()\)",
        r"(?<![\w\\])(C)()_\{?(\d+)\}?\^\{?(\d+)()\}?",
    )
)
"""How binomial coefficients are written besides `\binom`: `{}_5C_2`, `^5C_2`, `5C2`, `C(5,2)`, `nCr(5,2)`, `C_5^2`; and
numbers of permutations: `{}_5P_2`, `^5P_2`, `5P2`, `nPr(5,2)` (`P(5,2)` is a point, or a probability)."""


_GROUP = r"((?:[^{}]|\{[^{}]*\})*)"
_OVER = re.compile(r"\{" + _GROUP + r"\\over(?![a-z])" + _GROUP + r"\}")
_CHOOSE = re.compile(r"\{" + _GROUP + r"\\choose(?![a-z])" + _GROUP + r"\}")
_SYSTEM = re.compile(
    r"^\\(?:left\s*\\\{\s*\\)?begin\{(?:cases|aligned|array|gathered)\}(?:\{\w\})?([^&]*?)\\end\{\w+\}(?:\s*\\right\s*\.)?$",
    re.DOTALL,
)
"""A system: equations below each other without columns."""
_LEAD = r"(?i:(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|:|=))"


def _temperature(found: re.Match[str]) -> str:
    return r"\text{ celsius}" if found[2] == "C" else r"\text{ fahrenheit}"


_LOOKS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(form), new)
    for form, new in (
        (r"\\[hv]?phantom\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}", " "),
        (r"\\(?:text)?color(?:box)?\s*(?:\[\w*\])?\s*\{[^{}]*\}", " "),
        (r"\\\\\s*\[[\d.]+ ?\w+\]", r"\\\\"),
        (r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])", " "),
        (r"\{\s*\\(?:rm|bf|it|sf|tt|cal)(?![A-Za-z])\s*([^{}]*)\}", r"\\mathrm{\1}"),
        (r"\\(?:rm|bf|it|sf|tt)\s*(?=\{)", r"\\mathrm"),
        (r"\\rm\s+(\w+)", r"\\mathrm{\1}"),
        # Braces around a unit, and a full stop in the font of text.
        (r"(\d\s*)\{\s*(\\(?:text|mathrm)\s*\{[^{}]*\})\s*\}", r"\1\2"),
        (r"\\text\s*\{[.,;:\s]*\}\s*$", ""),
        (r"\+/[-−–]", r"\\pm "),
        (r"\{([:=;])\}", r"\1"),
        (r"(?<=\d)\\text\s*\{,\}(?=\d)", "{,}"),
        (r"\\ensuremath(?=\s*\{)", " "),
        (
            r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°|℃)\s*(\\(?:text|mathrm)\s*\{\s*)?(C|F)(?![\w'])(?(1)\s*\})",
            _temperature,
        ),
        (r"\s(?:\\[,;: ]|~)?\s*(k?m|cm|ft|mi)/(s|h|hr|min)(\^\s*\{?[23]\}?)?$", r"\\text{ \1/\2}\3"),
        # "A, C and D" and "I and III" are lists of letters in any font.
        (r"^\\text\s*\{\s*((?:[A-Z]|[IVX]+)(?:(?:\s*,\s*(?:and\s+)?|\s+and\s+)(?:[A-Z]|[IVX]+))+)\s*\}$", r"\1"),
        (r"^\\text\s*\{\s*" + _LEAD + r"\s*\}", ""),
        (r"^(\\text\s*\{)?\s*" + _LEAD + r"(?=\s*[^\s}])", r"\1"),
        # Intervals as they are written in France, and a union typed as a letter.
        (r"(^|\\cup|∪|\\in|=)(\s*(?:\\left\s*)?)\]([^\[\]()]*[,;][^\[\]()]*)\[", r"\1\2(\3)"),
        (r"(^|\\cup|∪|\\in|=)(\s*(?:\\left\s*)?)\]([^\[\]()]*[,;][^\[\]()]*)\]", r"\1\2(\3]"),
        (r"\[([^\[\]()]*[,;][^\[\]()]*)\[(?=\s*(?:$|\\cup|∪|U))", r"[\1)"),
        (r"(,[^()\[\],]*[)\]])\s*U\s*(?=(?:\\left\s*)?[(\[])", r"\1\\cup "),
    )
)
_CODES = {
    **dict.fromkeys(("USD", "US", "CAD", "AUD"), "\\$"),
    **dict.fromkeys(("JPY", "CNY", "RMB"), "¥"),
    **dict.fromkeys(("INR", "RS"), "₹"),
    "EUR": "€",
    "GBP": "£",
}
_CODE = re.compile(
    r"^(-?)\s*(?:\\(?:text|mathrm)\s*\{\s*)?(USD|US|CAD|AUD|JPY|CNY|RMB|INR|Rs\.?|EUR|GBP)[\s~]*\}?[\s~]*(?:\\?\$)?[\s~]*(?=[\d.])"
)


def visible(text: str) -> str:
    """The text without what only says how it looks: colours, sizes, fonts of the old kind, gaps that print nothing."""
    text = _WIDE.sub(_named, text)
    text = _SYSTEM.sub(_listed, text)
    for form, new in _LOOKS:
        text = form.sub(new, text)
    return _CODE.sub(lambda found: found[1] + _CODES[found[2].rstrip(".").upper()], text.strip())


def _listed(found: re.Match[str]) -> str:
    lines = [line.strip(" \t\n,;.") for line in found[1].split("\\\\")]
    lines = [line for line in lines if line]
    return ", ".join(lines) if all("=" in line for line in lines) else found[0]


def _named(found: re.Match[str]) -> str:
    above, slash, below = unicodedata.normalize("NFKC", found[0]).partition("⁄")
    return f"\\frac{{{above}}}{{{below}}}" if slash else above


def _chosen(found: re.Match[str]) -> str:
    parts = [part.strip() for part in found.groups() if part]
    above, below = (part for part in parts if part not in {"C", "P"})
    # `C(2,3)` is a point.
    if above.isdecimal() and below.isdecimal() and int(above) < int(below):
        return found[0]
    if "P" in parts:
        return f"\\frac{{({above})!}}{{({above}-({below}))!}}"
    return f"\\binom{{{above}}}{{{below}}}"


def plain(text: str) -> str:
    """The text with one spelling for its unicode, fractions, binomials and thousands."""
    for char, latex in UNICODE.items():
        text = text.replace(char, latex)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺⁽⁾ⁿˣ]+", lambda m: "^{" + m[0].translate(_POWERS) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_INDICES) + "}", text)
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    for form in _CHOICES:
        text = form.sub(_chosen, text)
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times ", text)
    text = text.replace(r"\(", " ").replace(r"\)", " ").replace(r"\[", " ").replace(r"\]", " ")
    # A negative or thin space after a digit's comma is how LaTeX sets thousands; so are thin spaces between groups.
    text = re.sub(r"(?<=\d),\s*\\!\s*(?=\d)", "{,}", text)
    text = re.sub(r"(?<=\d)\\!\s*,\s*\\!?\s*(?=\d)", "{,}", text)
    text = re.sub(r"(?<![\d.,_])\d{1,3}(?: \d{3})+(?![\d/])", lambda m: m[0].replace(" ", "{,}"), text)
    text = re.sub(r"(?<=\d)\\[, ]\s*(?=\d{3}(?!\d))", "{,}", text)
    text = re.sub(r"(?<![\w.,])\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?(?![\w.,])", _continental, text)
    text = re.sub(r"(?<![\w.,'])\d{1,3}(?:'\d{3})+(?![\d'])|(?<![\w.,])\d{1,3}(?:_\d{3}){2,}(?!\w)", _ungrouped, text)
    return re.sub(r"(?<=\d)\{,\\?[!,]?\}(?=\d)", "{,}", text)


def _continental(found: re.Match[str]) -> str:
    return found[0].replace(".", "").replace(",", ".")


def _ungrouped(found: re.Match[str]) -> str:
    return found[0].replace("'", "").replace("_", "")
