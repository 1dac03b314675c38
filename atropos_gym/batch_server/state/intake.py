"""Groups at the door: what comes in, what must hold besides the body's own rules, what the sender is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from atropos_gym.batch_server.state.packed import PackedGroup, pack_group
from atropos_gym.batch_server.state.refusals import Problem
from atropos_gym.wire import Registration, ScoredDataGroup, policy_version_of, says_complete

__all__ = ["Incoming", "Receipt", "misfits"]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A group that passed validation.

    Attributes:
        packed: what was sent, as it is kept.
        free: its fields that are no arrays of numbers.
        unknown_fields: names that are not part of a group.
    """

    packed: PackedGroup
    free: Mapping[str, Any]
    unknown_fields: tuple[str, ...] = ()

    @classmethod
    def of(cls, group: ScoredDataGroup, unknown_fields: tuple[str, ...] = ()) -> Self:
        """Packs a validated group."""
        return cls.again(pack_group(group), unknown_fields)

    @classmethod
    def again(cls, packed: PackedGroup, unknown_fields: tuple[str, ...] = ()) -> Self:
        """A group that is packed already."""
        return cls(packed, packed.free(), unknown_fields)

    @property
    def env_id(self) -> int | None:
        """The sender; None where it did not say."""
        env_id: int | None = self.free.get("env_id")
        return env_id

    @property
    def policy_version(self) -> int | None:
        """The lowest version that sampled in it; None where unknown."""
        return policy_version_of(self.free.get("group_overrides"))

    @property
    def complete(self) -> bool:
        """Whether the sender says that these are all sequences of the group."""
        return says_complete(self.free.get("group_overrides"), self.packed.size)


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
        problems.extend(_misfits(index, one, config, fingerprint))
    return problems


def _misfits(
    index: int, one: Incoming, config: Registration | None, fingerprint: str | None
) -> Iterator[Problem]:
    if config is not None:
        size = one.packed.size
        if config.groups_per_update is None and size > config.batch_size:
            message = f"group has {size} sequences, batch_size is {config.batch_size}"
            yield Problem("too_long", ("tokens",), message, index)
        too_long = one.packed.lengths > config.max_token_len
        if config.max_token_len > 0 and too_long.any():
            row = int(too_long.argmax())
            length = one.packed.lengths[row]
            message = f"sequence has {length} tokens, max_token_len is {config.max_token_len}"
            yield Problem("too_long", ("tokens", row), message, index)
    theirs = (one.free.get("group_overrides") or {}).get("tokenizer_fingerprint")
    if fingerprint is not None and theirs is not None and theirs != fingerprint:
        path = ("group_overrides", "tokenizer_fingerprint")
        message = f"sampled with tokenizer {str(theirs)[:100]}, the learner's is {fingerprint}"
        yield Problem("tokenizer_mismatch", path, message, index)
