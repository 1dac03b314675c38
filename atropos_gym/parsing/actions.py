"""From an assistant's text to one action of a Gymnasium space.

The parser never guesses, never samples, never clips and never raises on a text: a reply is one action, or
it is invalid with a reason. What an invalid action costs is the environment's affair. The declared format is
read and nothing else, every format in time linear in the text's length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from gymnasium import Space
from gymnasium.spaces import Discrete

from atropos_gym.errors import ConfigError
from atropos_gym.parsing._calls import read_call
from atropos_gym.parsing._objects import read_object
from atropos_gym.parsing._phrases import read_bare_word, read_list, read_number
from atropos_gym.parsing._tag import read_tag
from atropos_gym.parsing._text import visible
from atropos_gym.parsing._values import ARRAY_SPACES, check_space, read_value
from atropos_gym.parsing._words import Words, find_words
from atropos_gym.parsing.parsed import ParsedAction, invalid, is_same
from atropos_gym.parsing.saying import ACTION_FORMATS, exact_texts
from atropos_gym.parsing.tool_calls import find_dialect

__all__ = ["ActionFormat", "parse_action"]

ActionFormat = Literal["tag", "json", "tool_call", "bare_word", "number", "box"]

_WORD_READERS = {"tag": read_tag, "bare_word": read_bare_word, "number": read_number}
_NO_TEXTS: dict[str, ParsedAction] = {}


def parse_action(
    completion: str,
    space: Space[Any],
    format: str = "tag",
    *,
    names: Sequence[Any] | Mapping[Any, Any] | None = None,
    aliases: Sequence[Any] | Mapping[str, Any] | None = None,
    legal: Collection[Any] | None = None,
    dialect: str | None = None,
) -> ParsedAction:
    """Reads one action of ``space`` out of an assistant's text.

    Args:
        completion: the assistant's text of this turn, never the observation.
        space: the action space. ``tag``, ``bare_word`` and ``number`` are for ``Discrete``; ``box`` for
            ``Box``, ``MultiDiscrete`` and ``MultiBinary``; ``json`` and ``tool_call`` for these and for
            ``Dict`` and ``Tuple`` of them.
        format: the declared container, one of ``ACTION_FORMATS``. There is no second look at the prose.
        names: one word for each action of a ``Discrete`` space, in order from ``space.start``, or a
            mapping that says which is whose. For ``Dict`` and ``Tuple`` they mirror the space: a mapping or a
            sequence by part, None for a part without.
        aliases: further texts and the actions they stand for; they mirror the space too.
        legal: the actions allowed now, as values of the space; None allows all.
        dialect: of ``tool_call`` alone: how calls are written, see ``parse_tool_calls``; None is ``hermes``.

    Returns:
        The action as a member of ``space``, or the reason why there is none.

    Raises:
        ConfigError: format, space, names, aliases or dialect cannot be used; never because of ``completion``.

    Example:
        >>> from gymnasium.spaces import Box, Discrete
        >>> parse_action("I take one. <action>Hit</action>", Discrete(2), "tag", names=("stick", "hit"))
        ParsedAction(value=1, valid=True, reason=None)
        >>> parse_action("I will not hit.", Discrete(2), "bare_word", names=("stick", "hit")).reason
        'not_an_action'
        >>> parse_action('Left. {"action": [0.5, -1]}', Box(-1, 1, (2,)), "json").value
        array([ 0.5, -1. ], dtype=float32)
    """
    words: Words | None = None
    if isinstance(space, Discrete):
        words = find_words(space, names, aliases)  # type: ignore[arg-type]
        texts = words.exact.get((format, dialect))
        if texts is None:
            texts = _texts(format, dialect, space, words)
        parsed = texts.get(completion)
        if parsed is None:
            parsed = _read(completion, format, dialect, space, names, aliases, words)
        if legal is not None and parsed.valid and parsed.value not in legal:
            return invalid("not_legal")
        return parsed
    _check(format, dialect, space)
    check_space(space, names, aliases)
    parsed = _read(completion, format, dialect, space, names, aliases, None)
    if legal is not None and parsed.valid and not any(is_same(parsed.value, one) for one in legal):
        return invalid("not_legal")
    return parsed


def _texts(format: str, dialect: str | None, space: Discrete, words: Words) -> dict[str, ParsedAction]:
    """The texts that a policy which knows the format says, and what each means."""
    _check(format, dialect, space)
    texts = {text: ParsedAction(value, True) for text, value in exact_texts(words, format, dialect)}
    words.exact[format, dialect] = texts
    return texts


def _check(format: str, dialect: str | None, space: Space[Any]) -> None:
    if format not in ACTION_FORMATS:
        raise ConfigError(f"format must be one of {', '.join(ACTION_FORMATS)}; got {format!r}")
    if format in _WORD_READERS and not isinstance(space, Discrete):
        raise ConfigError(f"format {format!r} needs a Discrete action space, got {space}: use json or box")
    if format == "box" and not isinstance(space, ARRAY_SPACES):
        raise ConfigError(
            f"format 'box' needs a Box, MultiDiscrete or MultiBinary space, got {space}: use json"
        )
    if format == "tool_call":
        find_dialect(dialect or "hermes")
    elif dialect is not None:
        raise ConfigError(f"dialect belongs to tool calls; format {format!r} has none, got {dialect!r}")


def _read(
    completion: str,
    format: str,
    dialect: str | None,
    space: Space[Any],
    names: Any,
    aliases: Any,
    words: Words | None,
) -> ParsedAction:
    text = visible(completion)
    if text is None:
        return invalid("unclosed_think")
    if words is not None and format in _WORD_READERS:
        return _WORD_READERS[format](text, words)

    def read(value: Any) -> ParsedAction:
        return read_value(value, space, names, aliases)

    if format == "tool_call":
        return read_call(text, find_dialect(dialect or "hermes"), words is not None, read)
    return read_object(text, read) if format == "json" else read_list(text, read)
