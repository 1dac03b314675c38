"""From a tree of turns to rows: one for each end of it, and every turn trained in one of them only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atropos_gym.messages import Message
from atropos_gym.rollout._turns import Prompt, Said, line_of
from atropos_gym.rollout.episode import UNTRAINED_LOGPROB, UNTRAINED_MASK, Row, Turn

__all__ = ["rows_of"]


def rows_of(said: Sequence[Said], trained: set[Said], left_out: Collection[Said] = ()) -> list[Row]:
    """Returns the rows of one episode.

    Args:
        said: its turns, in order; turns before them may be others'.
        trained: turns that are trained in other rows; those of these rows are added. In a row they are
            context, as is a turn that cannot be trained.
        left_out: turns that nothing is to be trained on, unless one of ``said`` goes on from them.
    """
    own = [one for one in said if one not in left_out]
    inner = {before for one in own for before in line_of(one)[:-1]}
    heard: set[Prompt | Said] = set()
    rows = []
    for leaf in own:
        if leaf in inner:
            continue
        line = line_of(leaf)
        while line and not _trains(line[-1], trained):
            line.pop()
        if line:
            rows.append(_row(line, trained, heard))
    return rows


def _trains(said: Said, trained: set[Said]) -> bool:
    return said.trainable is True and said not in trained and bool(said.ids)


def _row(line: list[Said], trained: set[Said], heard: set[Prompt | Said]) -> Row:
    row = Row([], [], [])
    for said in line:
        prompt = said.prompt
        row.ids += prompt.ids
        row.mask += [UNTRAINED_MASK] * len(prompt.ids)
        row.logprobs += [UNTRAINED_LOGPROB] * len(prompt.ids)
        start = len(row.ids)
        row.ids += said.ids
        if _trains(said, trained):
            row.mask += said.ids
            row.logprobs += said.logprobs
            turn = Turn(start, len(row.ids), said.reward or 0.0, said.version, said.cut)
            turn.last_version = said.last_version
            row.turns.append(turn)
            trained.add(said)
        else:
            row.mask += [UNTRAINED_MASK] * len(said.ids)
            row.logprobs += [UNTRAINED_LOGPROB] * len(said.ids)
        row.messages += _unheard(prompt, prompt.heard, heard)
        row.messages += _unheard(said, [said.spoken], heard)
    return row


def _unheard(who: Prompt | Said, messages: list[Message], heard: set[Prompt | Said]) -> list[Message]:
    """Returns messages that no earlier row of the episode has."""
    if who in heard:
        return []
    heard.add(who)
    return messages
