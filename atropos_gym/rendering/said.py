"""What people may hand in as messages and tools, and what they are told where it is something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from atropos_gym.errors import TemplateError

__all__ = [
    "ROLES",
    "checked_ids",
    "checked_messages",
    "checked_text",
    "checked_tools",
    "heard_messages",
    "images_of",
    "opening_messages",
]

#: A role is written into the text by most templates, so it must be a known word.
ROLES = ("system", "developer", "user", "assistant", "tool")
_IMAGES = ("image", "image_url", "input_image")


def checked_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """Returns messages that have a known role and content.

    Raises:
        TypeError: no list of mappings.
        TemplateError: an unknown role, or content that is neither text nor parts.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__} "
            f"{messages!r:.60}"
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(
                f"message {place} must be a mapping with role and content, got {type(message).__name__} "
                f"{message!r:.60}"
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise TemplateError(
                f"the role of message {place} must be one of {', '.join(ROLES)}, got {role!r}"
            )
        if isinstance(content, str) or (
            content is None and role == "assistant" and message.get("tool_calls")
        ):
            continue
        if not isinstance(content, (list, tuple)):
            raise TemplateError(
                f"content of {role} message {place} must be a str or a list of parts, got "
                f"{type(content).__name__}"
            )
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
                raise TemplateError(
                    f"a part of {role} message {place} must be a mapping with a type, got {part!r:.60}"
                )
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise TemplateError(f"a text part of {role} message {place} has no text: {dict(part)!r:.60}")
    return messages


def opening_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """Returns the messages of a prompt.

    Raises:
        TypeError: no list of mappings.
        TemplateError: none at all, or the last one is the assistant's; or as ``checked_messages``.
    """
    opening = checked_messages(messages)
    if not opening:
        raise TemplateError("a prompt needs at least one message")
    if opening[-1]["role"] == "assistant":
        raise TemplateError("the last message of a prompt is the assistant's: nobody is to answer it")
    return opening


def heard_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """Returns the messages of a bridge.

    Raises:
        TypeError: no list of mappings.
        TemplateError: none at all, or one of the assistant's; or as ``checked_messages``.
    """
    heard = checked_messages(messages)
    if not heard:
        raise TemplateError("a bridge needs at least one message")
    if any(message["role"] == "assistant" for message in heard):
        raise TemplateError("a bridge holds no assistant message: the policy speaks by sampling")
    return heard


def checked_tools(tools: Any) -> list[Any] | None:
    """Returns schemas of tools as a list, or None; functions become their schemas.

    Raises:
        TypeError: no list of mappings or functions.
        TemplateError: a function without type hints or docstring.
    """
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise TypeError(f"tools must be a list of schemas, got {type(tools).__name__} {tools!r:.60}")
    schemas: list[Any] = []
    for place, tool in enumerate(tools):
        if callable(tool):
            from atropos_gym.tokenizers.hf import tool_schema

            try:
                schemas.append(tool_schema(tool))
            except Exception as error:  # what is missing: type hints, a docstring, a line for an argument
                reason = " ".join(str(error).split())
                raise TemplateError(
                    f"tool {place} has no schema ({reason}): give one as a mapping"
                ) from error
        elif isinstance(tool, Mapping):
            schemas.append(tool)
        else:
            raise TypeError(f"tool {place} must be a schema or a function, got {type(tool).__name__}")
    return schemas


def checked_text(text: Any) -> str:
    """Returns text that a policy says.

    Raises:
        TypeError: no str.
    """
    if not isinstance(text, str):
        raise TypeError(f"what a policy says must be a str, got {type(text).__name__} {text!r:.60}")
    return text


def checked_ids(ids: Any, rows: int) -> tuple[int, ...]:
    """Returns sampled ids as ints.

    Raises:
        TypeError: no sequence of integers.
        TemplateError: an id outside the model's rows.
    """
    try:
        found = tuple(map(index, ids))
    except TypeError:
        raise TypeError(f"sampled ids must be a sequence of integers, got {ids!r:.60}") from None
    if found and (min(found) < 0 or max(found) >= rows):
        place = next(i for i, token in enumerate(found) if not 0 <= token < rows)
        raise TemplateError(f"id {found[place]} at position {place} lies outside the model's {rows} rows")
    return found


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the images in messages, in order: what stands under ``image``, ``image_url`` or ``url``.

    Example:
        >>> images_of([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
        ['a.png']
    """
    found: list[Any] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or content is None:
            continue
        for part in content:
            if part["type"] in _IMAGES:
                held = next((part[key] for key in (*_IMAGES, "url", "path", "base64") if key in part), None)
                found.append(held["url"] if isinstance(held, Mapping) and "url" in held else held)
    return found
