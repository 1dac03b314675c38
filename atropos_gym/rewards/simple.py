"""Rewards that need no mathematics: the same text, the right form.

Each is a pure function of the assistant's text, in linear time, and raises for nothing that the text says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from atropos_gym.errors import ConfigError, UnusableGold
from atropos_gym.rewards._commitment import boxes
from atropos_gym.rewards._text import visible
from atropos_gym.rewards.verdict import Verdict, right, unparsed, wrong

__all__ = ["exact_match", "format_reward", "json_valid", "regex_match", "tag_count"]


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


def regex_match(completion: str, pattern: str | re.Pattern[str], *, opened: bool = False) -> float:
    r"""Returns 1.0 where the visible text, blanks at both ends aside, matches a pattern as a whole.

    A text pattern is matched with ``re.DOTALL``. Its time is the pattern's own: nested repeats such as
    ``(a+)+`` can take for ever.

    Args:
        completion: the assistant's text.
        pattern: what the whole visible text must match.
        opened: the prompt itself opened a think block.

    Raises:
        ConfigError: the pattern cannot be compiled.

    Example:
        >>> regex_match("<think>hm</think> go north", r"go (north|south)"), regex_match("go up", r"go north")
        (1.0, 0.0)
    """
    try:
        compiled = re.compile(pattern, re.DOTALL) if isinstance(pattern, str) else pattern
    except re.error as error:
        raise ConfigError(f"pattern must be a regular expression, got {pattern!r}: {error}") from error
    text = visible(completion, opened)
    return float(text is not None and compiled.fullmatch(text.strip()) is not None)


# What opens and what closes each form; something must stand between.
_FORMS: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "answer": (re.compile(r"<answer>", re.I | re.A), re.compile(r"</answer>", re.I | re.A)),
    "tag": (re.compile(r"<action>", re.I | re.A), re.compile(r"</action>", re.I | re.A)),
    "hash": (re.compile(r"^####", re.M), re.compile(r"$", re.M)),
}


def format_reward(
    completion: str, *, format: str = "answer", think: bool = False, opened: bool = False
) -> float:
    r"""Returns 1.0 where the visible text has exactly one container of the form, closed and not empty.

    Args:
        completion: the assistant's text.
        format: ``answer`` (``<answer>`` tags), ``tag`` (``<action>`` tags), ``boxed`` or ``hash`` (a line
            that begins with ``####``).
        think: also wants a closed think block before it.
        opened: the prompt itself opened a think block.

    Raises:
        ConfigError: no such format.

    Example:
        >>> format_reward("2 + 2 <answer>4</answer>"), format_reward("4"), format_reward("<answer>4")
        (1.0, 0.0, 0.0)
        >>> format_reward(r"2 + 2</think>\boxed{4}", format="boxed", think=True, opened=True)
        1.0
    """
    if format not in _FORMS and format != "boxed":
        raise ConfigError(f"format must be one of {', '.join((*_FORMS, 'boxed'))}; got {format!r}")
    text = visible(completion, opened)
    if text is None or (think and "</think>" not in completion):
        return 0.0
    if format == "boxed":
        insides = [text[box.inside : box.end] if box.end >= 0 else "" for box in boxes(text)]
    else:
        opener, closer = _FORMS[format]
        insides = []
        for match in opener.finditer(text):
            end = closer.search(text, match.end()) if not insides else None
            insides.append("" if end is None else text[match.end() : end.start()])
    return float(len(insides) == 1 and bool(insides[0].strip()))


def tag_count(completion: str, *, tags: Sequence[str] = ("think", "answer"), opened: bool = False) -> float:
    r"""Returns the fraction of opening and closing tags that stand there exactly once.

    ``sum over tags of ([count of <t> = 1] + [count of </t> = 1]) / (2 * number of tags)``: a smoother form of
    "the tags are right", as ``tag_count_reward`` of huggingface/open-r1 has it.

    Args:
        completion: the assistant's text.
        tags: names of the tags.
        opened: the prompt itself wrote the first tag, which is counted as if it stood there.

    Raises:
        ConfigError: no tags.

    Example:
        >>> tag_count("<think>a</think><answer>4</answer>"), tag_count("<think>a<answer>4</answer>")
        (1.0, 0.75)
        >>> tag_count("a</think><answer>4</answer>", opened=True)
        1.0
    """
    if not tags or isinstance(tags, str):
        raise ConfigError(f"tags must be names such as ('think', 'answer'), got {tags!r}")
    counts = [completion.count(f"<{slash}{tag}>") for tag in tags for slash in ("", "/")]
    counts[0] += opened
    return sum(count == 1 for count in counts) / len(counts)


_FENCE = re.compile(r"```(?:json)?\s*\n(.*)```", re.S | re.I | re.A)


def json_valid(completion: str, *, keys: Sequence[str] = (), opened: bool = False) -> float:
    r"""Returns 1.0 where the visible text is one JSON document, in a fence or not.

    Args:
        completion: the assistant's text.
        keys: the document must be an object with these keys, where any are given.
        opened: the prompt itself opened a think block.

    Example:
        >>> json_valid('{"move": "hit"}', keys=["move"]), json_valid("```json\n[1]\n```"), json_valid("{1}")
        (1.0, 1.0, 0.0)
    """
    text = visible(completion, opened)
    if text is None:
        return 0.0
    text = text.strip()
    fenced = _FENCE.fullmatch(text)
    try:
        document = json.loads(text if fenced is None else fenced[1], parse_constant=_refuse, parse_int=float)
    except (ValueError, RecursionError):
        return 0.0
    return float(not keys or (isinstance(document, dict) and all(key in document for key in keys)))


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")
