"""Stops the clock that some chat templates read: a run that crosses midnight must keep one prompt a seed."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from atropos_gym.errors import ConfigError

__all__ = ["on_day", "pin_clock", "pinned_day"]

_DIRECTIVE = re.compile(r"%-?[A-Za-z]")
_DAY_FORMS = ("%Y-%m-%d", "%d %b %Y", "%d %B %Y")
_day: ContextVar[datetime.date | None] = ContextVar("day", default=None)


@contextmanager
def on_day(day: datetime.date | None) -> Iterator[None]:
    """Makes clocks that are pinned in this block show ``day``; None leaves them at today's.

    A renderer that another process makes anew, perhaps after midnight, keeps its day.
    """
    token = _day.set(day)
    try:
        yield
    finally:
        _day.reset(token)


def pinned_day(kwargs: Mapping[str, Any], reads_date_string: bool, name: str) -> datetime.date:
    """Returns the day that a template's clock shows.

    It is today's, at construction (or that of ``on_day``); or ``date_string`` of the template's variables,
    where the template calls the clock and does not read that name itself.

    Raises:
        ConfigError: a ``date_string`` that is no day.

    Example:
        >>> pinned_day({"date_string": "26 Jul 2024"}, False, "x")
        datetime.date(2024, 7, 26)
    """
    wanted = kwargs.get("date_string")
    if wanted is None or reads_date_string:
        return _day.get() or datetime.date.today()
    for form in _DAY_FORMS:
        try:
            return datetime.datetime.strptime(str(wanted), form).date()
        except ValueError:
            continue
    raise ConfigError(
        f"template_kwargs['date_string']={wanted!r} is no day for the clock of {name}: write '2025-01-31'"
    )


def pin_clock(source: str, day: datetime.date) -> str:
    """Returns a template with a macro in place of the clock ``strftime_now``.

    Example:
        >>> import jinja2
        >>> source = pin_clock("{{ strftime_now('%d %B') }}", datetime.date(2024, 7, 26))
        >>> jinja2.Template(source).render()
        '26 July'
    """
    moment = datetime.datetime(day.year, day.month, day.day)
    chain = ""
    for directive in sorted(set(_DIRECTIVE.findall(source))):  # a format stands somewhere in the source
        value = moment.strftime(directive)
        if value != directive:
            chain += f" | replace('{directive}', {json.dumps(value, ensure_ascii=False)})"
    macro = "{% macro strftime_now(format) %}{{ format" + chain + " }}{% endmacro %}"
    # trim_blocks eats one newline behind a tag; the template's own first newline must stay.
    return macro + ("\n" if source.startswith("\n") else "") + source
