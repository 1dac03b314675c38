"""Tables of the pieces that a file lists."""

from __future__ import annotations

from collections.abc import Iterable

from atropos_gym.html import Pieces

__all__ = ["tables"]


def tables(pieces: Pieces, ids: Iterable[int]) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the pieces and the control names of ids, each listed once, as a file holds them."""
    texts: dict[int, str] = {}
    control: dict[int, str] = {}
    for id_ in sorted(set(ids)):
        name = pieces.control(id_)
        if name is not None:
            control[id_] = name
        else:
            texts[id_] = pieces.text(id_)
    return texts, control
