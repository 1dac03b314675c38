"""Characters that mean the same, and the part of a completion that counts."""

from __future__ import annotations

__all__ = ["plain_characters", "visible"]

_SPACES = (0x00A0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)
_ZERO_WIDTH = (0x00AD, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2065), 0xFEFF)
_TABLE: dict[int, str | None] = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys((0x2010, 0x2011, 0x2212), "-"),
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys(_ZERO_WIDTH),
}


def plain_characters(text: str) -> str:
    r"""Full-width forms, minus signs and odd spaces as ASCII; zero-width characters dropped.

    Letters of other alphabets that look alike stay what they are.

    Example:
        >>> plain_characters("\u22125\u00a0\uff05\u200b")
        '-5 %'
    """
    return text if text.isascii() else text.translate(_TABLE)


def visible(completion: str, opened: bool) -> str | None:
    """Returns what follows the last closing think tag; None where a think block is still open.

    Args:
        completion: the assistant's text.
        opened: the prompt itself opened a think block.

    Example:
        >>> visible("3?</think>4", opened=True), visible("<think>4", opened=False)
        ('4', None)
    """
    end = completion.rfind("</think>")
    if end < 0 and opened:
        return None
    text = completion[end + len("</think>") :] if end >= 0 else completion
    return None if "<think>" in text else text
