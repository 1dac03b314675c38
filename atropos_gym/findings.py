"""What a check found: one line for a person, whether it is a fault, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Status"]

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
