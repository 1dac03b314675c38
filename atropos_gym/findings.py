"""What a check found: one line for a person, whether it is a fault, and what to do about it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Status", "faults", "fit", "table", "verdict"]

#: ``ok``; ``note``: worth knowing, training is right; ``wrong``: training on it would be wrong.
Status = Literal["ok", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: what was looked at, such as ``control text``.
        status: ``ok``, ``note`` or ``wrong``.
        detail: what was found, in one line.
        remedy: what to do about it; empty where nothing need be done.

    Example:
        >>> Finding("bos", "wrong", "written 2 times", "leave it out of the template").status
        'wrong'
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def fit(findings: Sequence[Finding]) -> bool:
    """Returns whether training is right: no finding is ``wrong``."""
    return all(finding.status != "wrong" for finding in findings)


def faults(findings: Sequence[Finding]) -> str:
    """Returns all that is ``wrong``, with remedies, in one line; empty where nothing is.

    Example:
        >>> faults([Finding("bos", "wrong", "written 2 times", "leave it out of the template")])
        'bos: written 2 times -> leave it out of the template'
    """
    return "; ".join(
        f"{finding.name}: {finding.detail}" + (f" -> {finding.remedy}" if finding.remedy else "")
        for finding in findings
        if finding.status == "wrong"
    )


def table(findings: Sequence[Finding], width: int = 100) -> str:
    """Returns findings for a person: a line each, its remedy under it.

    Args:
        findings: at least one.
        width: the most characters of a line, at least 60.

    Example:
        >>> print(table([Finding("bos", "wrong", "written 2 times", "leave it out of the template")]))
        wrong  bos  written 2 times
                    → leave it out of the template
    """
    label = max(len(finding.name) for finding in findings)
    indent = " " * (label + 9)
    lines: list[str] = []
    for finding in findings:
        start = f"{finding.status:<5}  {finding.name:<{label}}  "
        lines += _wrapped(finding.detail, width, start, indent)
        if finding.remedy:
            lines += _wrapped(finding.remedy, width, f"{indent}→ ", f"{indent}  ")
    return "\n".join(lines)


def verdict(findings: Sequence[Finding], *, train: str = "train on") -> str:
    """Returns what findings come to, in one line.

    Example:
        >>> verdict([Finding("bos", "ok", "written once")])
        'Fit to train on.'
    """
    wrong = [finding.name for finding in findings if finding.status == "wrong"]
    notes = sum(finding.status == "note" for finding in findings)
    if wrong:
        names = ", ".join(dict.fromkeys(wrong))
        return f"Training {train.removeprefix('train ')} this would be wrong ({names})."
    worth = {0: "", 1: "; 1 note is worth reading"}.get(notes, f"; {notes} notes are worth reading")
    return f"Fit to {train}{worth}."


class _Wrapper(textwrap.TextWrapper):
    """Wraps at blanks and before control tokens, whose text holds none."""

    wordsep_simple_re = re.compile(r"(\s+)|(?<![\s'(])(?=<[|｜])")


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    wrapper = _Wrapper(max(width, 60), first, rest, break_on_hyphens=False)
    return wrapper.wrap(text)
