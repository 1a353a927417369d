"""The words of an answer: functions, constants, units, and what a remark after a number may not say."""

from __future__ import annotations


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


FUNCTIONS = _set(
    """
    sin cos tan cot sec csc cis arcsin arccos arctan arccot asin acos atan sinh cosh tanh coth ln log lg exp
    sqrt cbrt abs floor ceil min max gcd lcm det factorial
    """
)
GREEK = _set(
    """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho
    sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar
    """
)
CONSTANTS = {"pi": "pi", "infty": "infty", "infinity": "infty", "inf": "infty", "oo": "infty"}
LINKS = frozenset({"or", "and", "to"})

SCALES = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}

_UNITS = {
    "percent": "% percent percentage",
    "degree": "degree degrees deg",
    "celsius": "celsius",
    "fahrenheit": "fahrenheit",
    "radian": "radian radians rad rads",
    "$": "$ dollar dollars usd buck bucks",
    "cent": "cent cents",
    "€": "€ euro euros eur",
    "£": "£ gbp",
    "¥": "¥ yen yuan jpy cny rmb",
    "₹": "₹ rupee rupees inr",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm cms centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kms kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kgs kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "ton": "ton tons tonne tonnes",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "l": "l liter liters litre litres",
    "gal": "gal gallon gallons",
    "cup": "cup cups",
    "ms": "ms millisecond milliseconds",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "mph": "mph",
    "kph": "kph kmh",
    "j": "joule joules",
    "n": "newton newtons",
    "w": "watt watts",
    "v": "volt volts",
    "hz": "hz hertz",
    "square unit": "sq",
}
CURRENCIES = frozenset("$€£¥₹")
UNITS = {spelling: unit for unit, spellings in _UNITS.items() for spelling in spellings.split()}
SHORT_UNITS = frozenset(
    word for word in UNITS if word.isalpha() and 2 <= len(word) <= 3 and word not in {"min", "in", "rad", "ton", "deg"}
)
"""Understood after a number also outside `\\text`, where other short runs of letters are products of symbols."""

NOT_A_REMARK = _set(
    """
    or and if not no more less least most than when for except where with without only about around
    approximately almost nearly between from to up over under at below above plus minus times negative
    half third quarter quarters thirds halves squared cubed each one two three four five six seven eight
    nine ten per of is are the answer mod base greater smaller larger fewer either neither both maybe
    otherwise else
    """
)
"""Words that change what the number before them says: with one of these the answer is not just that number."""

SHORT_TEXT = _set(
    """
    yes no true false odd even dne none all both am pm mon tue wed thu fri sat sun red
    one two six ten
    """
)
"""Runs of two or three letters that are words, not products of symbols."""

NOT_AN_ANSWER = _set(
    """
    n/a na nan null unknown tbd todo see proof omitted missing image figure diagram
    """
)

UNICODE = {
    "−": "-",
    "–": "-",
    "—": "-",
    "‐": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "÷": "/",
    "∕": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3]",
    "∜": r"\sqrt[4]",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "℃": r"\degree C",
    "。": ".",
    "、": ",",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "°": r"\degree ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∅": r"\emptyset ",
    "⟨": "(",
    "⟩": ")",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "λ": r"\lambda ",
    "μ": r"\mu ",
    "φ": r"\phi ",
    "ω": r"\omega ",
    "σ": r"\sigma ",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "⅛": r"\frac{1}{8}",
    "⁄": "/",
    "’": "'",
    "′": "'",
    "：": ":",
    "，": ",",
    "（": "(",
    "）": ")",
    "＝": "=",
    "％": "%",
    "＋": "+",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
    "∖": r"\setminus ",
    "⁻": "⁻",
    "∣": "|",
    "\u200b": "",
    "\ufeff": "",
    "…": r"\ldots ",
}

SAME = {
    "dfrac": "frac",
    "tfrac": "frac",
    "cfrac": "frac",
    "dbinom": "binom",
    "tbinom": "binom",
    "choose": "choose",
    "mod": "bmod",
    "leq": "le",
    "geq": "ge",
    "leqslant": "le",
    "geqslant": "ge",
    "neq": "ne",
    "lt": "<",
    "gt": ">",
    "lbrace": "{",
    "rbrace": "}",
    "lbrack": "[",
    "rbrack": "]",
    "lparen": "(",
    "rparen": ")",
    "langle": "(",
    "rangle": ")",
    "lvert": "|",
    "rvert": "|",
    "vert": "|",
    "mid": "|",
    "colon": ":",
    "ast": "*",
    "times": "*",
    "cdot": "*",
    "div": "/",
    "lor": "or",
    "vee": "or",
    "land": "and",
    "wedge": "and",
    "varnothing": "emptyset",
    "degree": "circ",
    "backslash": "setminus",
    "log": "log",
    "exponentialE": "e",
    "imaginaryI": "i",
    "arcsec": "arcsec",
    "tg": "tan",
    "ctg": "cot",
    "sim": "approx",
    "%": "%",
    "prime": "'",
    "lnot": "not",
    "pounds": "£",
    "euro": "€",
    "thickapprox": "approx",
}

BLANK = _set(
    """
    left right enspace thinspace medspace thickspace space allowbreak nobreak
    big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle
    textstyle scriptstyle quad qquad limits nolimits mathstrut hfill , ; : ! > ~
    """
) | {" "}

FONTS = _set(
    """
    text mbox hbox textrm textbf textit textsf texttt textnormal mathrm mathbf mathit mathsf mathtt
    boldsymbol bm operatorname emph underline boxed fbox mathnormal textup
    """
)
