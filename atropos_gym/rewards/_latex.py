"""LaTeX and plain text written in many ways, brought to one."""

from __future__ import annotations

import re

__all__ = ["FUNCTION_NAMES", "clean", "exact_decimals", "for_sympy"]

FUNCTION_NAMES = frozenset(
    "sqrt pi infinity inf sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lg max min"
    " gcd lcm mod det abs".split()
)
"""Words that belong to a formula."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}")
_TEXT = re.compile(
    r"(?<=(?P<tight>[\w)}]))?\\(?:text|textbf|textit|textrm|textsf|textnormal|emph|mathrm|mathbf|mathit|mathsf"
    r"|mathcal|boldsymbol|bm|mbox|hbox|operatorname)\*?\s*\{([^{}]*)\}(?=([A-Za-z0-9]))?"
)
_LAYOUT = re.compile(
    r"\\(?:left|right)\.|\\(?:left|right|middle|[bB]igg?[lr]?)(?![A-Za-z])"
    r"|\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it)\b|\\!|(?<![\w)}])\*\*|\*\*(?![\w({\\-])"
)
_TEMPERATURE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\u00b0)\s*([CF])\b")
_DEGREES = re.compile(r"(?<=[\w)}])\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b|\u00b0)")
_TRIGONOMETRIC = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b|\u00b0)")
_CURRENCY = re.compile(
    r"(?:\b(?:US|CA|AU|USD|EUR|GBP)\s?)?\\?\$|[\u00a2-\u00a5\u20a0-\u20cf]|\\(?:pounds|euro)\b"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|\{,\})(?=\d{3}(?!\d))")
_BLANKS = re.compile(r"(?<!\\)\\(?:[,;:> ]|quad\b|qquad\b)|~")  # not the end of a matrix row: two backslashes
_SUPERSCRIPTS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207f", "0123456789-n"
)
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b\u207f]+")
_VULGAR = {
    "\u00bd": (1, 2), "\u2153": (1, 3), "\u2154": (2, 3), "\u00bc": (1, 4), "\u00be": (3, 4),
    "\u2155": (1, 5), "\u2156": (2, 5), "\u2157": (3, 5), "\u2158": (4, 5), "\u2159": (1, 6),
    "\u215a": (5, 6), "\u215b": (1, 8), "\u215c": (3, 8), "\u215d": (5, 8), "\u215e": (7, 8),
}  # fmt: skip
_SAME: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\%|\u066a|\bper\s?cent\b", "%"),
        (r"\\(?:leq|leqslant|leqq)(?![A-Za-z])|\u2264|<=|=<", r"\\le "),
        (r"\\(?:geq|geqslant|geqq)(?![A-Za-z])|\u2265|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|\u2260|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|"),
        (r"\u221e|\binfinity\b", r"\\infty "),
        (r"\u03c0", r"\\pi "),
        (r"\u03b8", r"\\theta "),
        (r"\u00b1|\+\s?/\s?-", r"\\pm "),
        (r"\u222a", r"\\cup "),
        (r"\u2229", r"\\cap "),
        (r"\u2208", r"\\in "),
        (r"\u2205|\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\u211d", r"\\mathbb{R}"),
        (r"\u00d7", r"\\times "),
        (r"\u00b7|\u22c5|\u2217", r"\\cdot "),
        (r"\u00f7", "/"),
        (r"\u221a", r"\\sqrt "),
        (r"\{,\}", ","),
    )
)


def _unwrap(pattern: re.Pattern[str], text: str, group: int) -> str:
    """Replaces each match by a group of it, the innermost first; nesting deeper than five stays."""

    def inside(match: re.Match[str]) -> str:
        before = " " if match.groupdict().get("tight") else ""
        after = " " if pattern is _TEXT and match[3] else ""
        return before + match[group] + after

    for _ in range(5):
        text, count = pattern.subn(inside, text)
        if not count:
            break
    return text


def clean(text: str) -> str:
    r"""Returns one spelling for what LaTeX and plain text can write in many.

    Layout, currency and degree signs go; ``\text{}`` leaves its content; fractions, comparisons and blanks
    get one form each. The text is short (an answer, not a completion).

    Example:
        >>> clean(r"\dfrac{1}{2}\%"), clean(r"10\text{ feet}"), clean(r"1\,234"), clean(r"$90^\circ$.")
        ('\\frac{1}{2}%', '10 feet', '1,234', '90')
    """
    text = _unwrap(_TEXT, _unwrap(_BOX, text, 1), 2)
    text = _LAYOUT.sub("", text)
    text = _CURRENCY.sub("", text)
    text = _BLANKS.sub(" ", _THOUSANDS.sub(",", text))
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
        for character, (top, low) in _VULGAR.items():
            text = text.replace(character, rf"\frac{{{top}}}{{{low}}}")
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    if _TRIGONOMETRIC.search(text):
        text = _ANGLE.sub(r"(\\frac{\1 \\pi}{180})", text)
    text = _DEGREES.sub("", _TEMPERATURE.sub(r" deg\1", text))
    text = " ".join(text.split()).strip(' *`"\u201c\u201d').rstrip(".,;: ")
    if text[:1] in ("'", "\u2018"):  # quotes around it; a prime stays
        text = text.strip("'\u2018\u2019").rstrip(".,;: ")
    return text.lstrip("= ")


# --- what sympy's reader needs ---------------------------------------------------------------------------
_ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt\s*(?=\()")
_BARE_ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt\s*(\d+(?:\.\d+)?|\\?[A-Za-z]+)(?![A-Za-z({])")
_PLAIN_NAMES = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|asin|acos|atan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|theta|max|min)"
    r"(?![A-Za-z])"
)
_SCIENTIFIC = re.compile(r"(?<![\w.}])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?![\w.])", re.A)
_INDEX = re.compile(r"_(\d)(?!\d)")
_SHORT_PAIR = re.compile(
    r"\\(frac|binom)\s*(\{[^{}]*\}|\\[A-Za-z]+|\w)\s*(?:([A-Za-z0-9])|(\\[A-Za-z]+)|(?=\{))", re.A
)
_SHORT_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_MIXED = re.compile(r"(?<![\d.\w}])(\d+)\s*(\\frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d))")
_SLASHED = re.compile(r"(?<![\d.\w)}/^])(\d+)\s*/\s*(\d+)(?=\s*(?:[A-Za-z(]|\\(?:pi|sqrt|theta)))")
_FRACTION_POWER = re.compile(r"\^\s*(\\frac\s*(?:\{[^{}]*\}|\w)\s*(?:\{[^{}]*\}|\w))")
_PLAIN_POWER = re.compile(r"\^\s*(-?\d+(?:\.\d+)?|-[A-Za-z])|\^\s*\(([^()]*)\)")
_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_COMMON = re.compile(r"(?<![\\A-Za-z])(gcd|lcm)(?=\s*\()|\\(lcm)(?![A-Za-z])")
_ABSOLUTE = re.compile(r"(?<![\\A-Za-z])abs\s*\(([^()]*)\)")
_PRODUCT = re.compile(r"(?<=[\d)])\s*(?=\()")


def for_sympy(text: str) -> str:
    r"""Returns a cleaned formula as latex2sympy reads it: names and roots as commands, powers in braces.

    Example:
        >>> for_sympy("2sqrt(3) + x^10"), for_sympy("1/2 x"), for_sympy(r"1\frac12 x")
        ('2\\sqrt{3} + x^{10}', '\\frac{1}{2} x', '(1+\\frac{1}{2}) x')
    """
    text = text.replace("**", "^").replace("*", r" \cdot ").replace("%", r" \cdot \frac{1}{100} ")
    text = _braced_roots(_BARE_ROOT.sub(r"\\sqrt{\1}", text))
    text = _SHORT_PAIR.sub(_pair, _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", _INDEX.sub(r"_{\1}", text)))
    text = _ABSOLUTE.sub(r"|\1|", text)
    text = _PLAIN_NAMES.sub(lambda match: "\\" + _SHORT_NAMES.get(match[1], match[1]) + " ", text)
    text = _COMMON.sub(lambda match: rf"\operatorname{{{match[1] or match[2]}}}", text)
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log ", text)
    text = _GROUPED.sub(lambda match: match[1].replace(",", ""), text)
    text = _FRACTION_POWER.sub(r"^{\1}", text)
    text = _PLAIN_POWER.sub(lambda match: "^{" + (match[1] or match[2]) + "}", text)
    text = _MIXED.sub(r"(\1+\2)", text)
    text = _SLASHED.sub(r"\\frac{\1}{\2}", text)
    return _PRODUCT.sub(r" \\cdot ", text)


_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\d.])", re.A)


def exact_decimals(text: str) -> str:
    r"""Returns a formula with its decimals as fractions: sympy would read binary floats.

    Example:
        >>> exact_decimals("0.25x + 1.5")
        '\\frac{025}{100}x + \\frac{15}{10}'
    """
    return _DECIMAL.sub(lambda match: rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}", text)


def _pair(match: re.Match[str]) -> str:
    top, low = match[2], match[3] or match[4]
    top = top if top.startswith("{") else f"{{{top}}}"
    return rf"\{match[1]}{top}" + (f"{{{low}}}" if low else "")


def _braced_roots(text: str) -> str:
    """Writes a root over brackets as a root over braces."""
    position = 0
    while match := _ROOT.search(text, position):
        depth, begin = 0, match.end()
        for at in range(begin, len(text)):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            if depth == 0:
                text = rf"{text[: match.start()]}\sqrt{{{text[begin + 1 : at]}}}{text[at + 1 :]}"
                break
        position = match.start() + len(r"\sqrt")
    return text
