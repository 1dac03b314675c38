"""Groups at the door: what comes in, what must hold besides the body's own rules, what the sender is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atropos_gym.batch_server.refusals import Problem
from atropos_gym.wire import Registration, ScoredDataGroup

__all__ = ["Incoming", "Receipt", "misfits"]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A group that passed validation.

    Attributes:
        group: what was sent.
        payload: the same as compact JSON, as it will be served.
        unknown_fields: names that are not part of a group.
    """

    group: ScoredDataGroup
    payload: bytes
    unknown_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of an accepted group.

    Attributes:
        group_id: its name.
        buffered: sequences in its environment's buffer if it went there, else None.
    """

    group_id: str
    buffered: int | None = None


def misfits(
    incoming: Sequence[Incoming], config: Registration | None, fingerprint: str | None
) -> list[Problem]:
    """Finds what this trainer could never use, each with its group's index in the list.

    Args:
        incoming: the groups of one post.
        config: the trainer's settings; None before it registered.
        fingerprint: of the learner's tokenizer; None where unknown.
    """
    problems: list[Problem] = []
    for index, one in enumerate(incoming):
        problems.extend(_misfits(index, one.group, config, fingerprint))
    return problems


def _misfits(
    index: int, group: ScoredDataGroup, config: Registration | None, fingerprint: str | None
) -> Iterator[Problem]:
    if config is not None:
        if config.groups_per_update is None and group.size > config.batch_size:
            message = f"group has {group.size} sequences, batch_size is {config.batch_size}"
            yield Problem("too_long", ("tokens",), message, index)
        if config.max_token_len > 0:
            for row, ids in enumerate(group.tokens):
                if len(ids) > config.max_token_len:
                    message = f"sequence has {len(ids)} tokens, max_token_len is {config.max_token_len}"
                    yield Problem("too_long", ("tokens", row), message, index)
                    break
    theirs = (group.group_overrides or {}).get("tokenizer_fingerprint")
    if fingerprint is not None and theirs is not None and theirs != fingerprint:
        path = ("group_overrides", "tokenizer_fingerprint")
        message = f"sampled with tokenizer {str(theirs)[:100]}, the learner's is {fingerprint}"
        yield Problem("tokenizer_mismatch", path, message, index)
