"""A pattern for many words that costs as little as one for few: some models have 20,000 control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["any_of"]


def any_of(spellings: Iterable[str]) -> str:
    """Returns a pattern for the longest of the spellings that stands at a place; none of them is "".

    An alternation of all would be tried one by one at every place; here they branch where they differ.

    Example:
        >>> any_of(["<s>", "</s>", "<sep>"])
        '<(?:s(?:>|ep>)|/s>)'
        >>> re.match(any_of(["<a", "<ab>"]), "<ab>")[0]
        '<ab>'
    """
    tree: dict[str, Any] = {}
    for spelling in spellings:
        node = tree
        for character in spelling:
            node = node.setdefault(character, {})
        node[""] = {}  # a spelling ends here
    return _pattern(tree) or "(?!)"


def _pattern(node: dict[str, Any]) -> str:
    """Returns the pattern of what may follow at a node of the tree."""
    ways: list[str] = []
    for first, rest in node.items():
        if not first:
            continue
        shared = first
        while len(rest) == 1 and "" not in rest:
            (character, rest) = next(iter(rest.items()))
            shared += character
        ways.append(re.escape(shared) + _pattern(rest))
    if not ways:
        return ""
    may_end = "" in node
    one = len(ways) == 1 and not may_end
    return (ways[0] if one else f"(?:{'|'.join(ways)})") + ("?" if may_end else "")
