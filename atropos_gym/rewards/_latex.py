"""LaTeX written in many ways, brought to one."""

from __future__ import annotations

import re

__all__ = ["clean"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\*?\s*\{([^{}]*)\}"
)
_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|\\(?:displaystyle|textstyle|limits|nolimits)\b|\\!|\*\*"
)
_DEGREES = re.compile(r"(?<=[\d})])\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b|\u00b0)(?!\s*[CF]\b)")
_CURRENCY = re.compile(r"\\?\$|[\u00a2\u00a3\u00a5\u20ac]|\\pounds\b|\\euro\b")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|\{,\})(?=\d{3}(?!\d))")
_BLANKS = re.compile(r"(?<!\\)\\(?:[,;: ]|quad\b|qquad\b)|~")  # not the end of a matrix row: two backslashes
_SAME: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\%|\bper\s?cent\b", "%"),
        (r"\\(?:leq|leqslant|leqq)(?![A-Za-z])|\u2264|<=", r"\\le "),
        (r"\\(?:geq|geqslant|geqq)(?![A-Za-z])|\u2265|>=", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\u221e", r"\\infty "),
        (r"\u03c0", r"\\pi "),
        (r"\u00b1", r"\\pm "),
        (r"\u222a", r"\\cup "),
        (r"\u00d7", r"\\times "),
        (r"\u00b7|\u22c5", r"\\cdot "),
        (r"\u00f7", "/"),
        (r"\u00b2", "^2"),
        (r"\u00b3", "^3"),
        (r"\{,\}", ","),
    )
)


def _unwrap(pattern: re.Pattern[str], text: str) -> str:
    """Replaces each group by its content, the innermost first; nesting deeper than five stays."""
    for _ in range(5):
        text, count = pattern.subn(lambda match: match[1], text)
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
    text = _unwrap(_TEXT, _unwrap(_BOX, text))
    text = _LAYOUT.sub("", text)
    text = _CURRENCY.sub("", text)
    text = _BLANKS.sub(" ", _THOUSANDS.sub(",", text))
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    text = _DEGREES.sub("", text)
    return " ".join(text.split()).strip(" *`\"'\u2018\u2019\u201c\u201d").rstrip(".,;: ")
