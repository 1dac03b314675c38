"""Rewards that need no mathematics: the same text, the right form, the length."""

from __future__ import annotations

import re

from atropos_gym.errors import ConfigError, UnusableGold
from atropos_gym.rewards._text import visible
from atropos_gym.rewards.verdict import Verdict, right, unparsed, wrong

__all__ = ["exact_match", "format_reward", "length_penalty"]


def exact_match(completion: str, gold: str, *, ignore_case: bool = False) -> Verdict:
    r"""Checks that the completion is the gold and nothing else, blanks at both ends aside.

    Raises:
        UnusableGold: the gold is blank.

    Example:
        >>> bool(exact_match(" Red\n", "red", ignore_case=True)), exact_match("it is red", "red").reason
        (True, 'not_equal')
    """
    wanted, said = gold.strip(), completion.strip()
    if not wanted:
        raise UnusableGold("the gold is blank: fix or drop this row")
    if not said:
        return unparsed("empty")
    if ignore_case:
        wanted, said = wanted.casefold(), said.casefold()
    return right() if said == wanted else wrong()


# What opens and what closes each form; something must stand between.
_FORMS: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "answer": (re.compile(r"<answer>", re.I | re.A), re.compile(r"</answer>", re.I | re.A)),
    "tag": (re.compile(r"<action>", re.I | re.A), re.compile(r"</action>", re.I | re.A)),
    "boxed": (re.compile(r"\\boxed\s*\{"), re.compile(r"\}")),
    "hash": (re.compile(r"^####", re.M), re.compile(r"$", re.M)),
}


def format_reward(completion: str, *, format: str = "answer", think: bool = False) -> float:
    """Returns 1.0 where the visible text has exactly one container of the form, closed and not empty.

    Args:
        completion: the assistant's text.
        format: ``answer`` (``<answer>`` tags), ``tag`` (``<action>`` tags), ``boxed`` or ``hash`` (``####``).
        think: also wants a closed think block before it.

    Raises:
        ConfigError: no such format.

    Example:
        >>> format_reward("2 + 2 <answer>4</answer>"), format_reward("4"), format_reward("<answer>4")
        (1.0, 0.0, 0.0)
    """
    if format not in _FORMS:
        raise ConfigError(f"format must be one of {', '.join(_FORMS)}; got {format!r}")
    text = visible(completion, opened=False)
    if text is None or (think and "</think>" not in completion):
        return 0.0
    opener, closer = _FORMS[format]
    openers = list(opener.finditer(text))
    if len(openers) != 1:
        return 0.0
    end = closer.search(text, openers[0].end())
    return float(end is not None and bool(text[openers[0].end() : end.start()].strip()))


def length_penalty(completion: str, *, limit: int, slack: int) -> float:
    """Returns 0.0 up to ``limit`` characters, then a straight line down to -1.0 at ``limit + slack``.

    Raises:
        ConfigError: ``limit`` or ``slack`` cannot be used.

    Example:
        >>> length_penalty("abc", limit=4, slack=4), length_penalty("abcdef", limit=4, slack=4)
        (0.0, -0.5)
    """
    if limit < 0 or slack < 1:
        raise ConfigError(f"limit must be >= 0 and slack >= 1, got limit={limit}, slack={slack}")
    over = len(completion) - limit
    return -min(1.0, over / slack) if over > 0 else 0.0
