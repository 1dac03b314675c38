"""Seeds: one integer of the run decides every start, every chance and every sample.

Each seed is a hash of where it is used, so it depends neither on order nor on timing, and a group that is
played again gets the same ones. Evaluation has a bit of its own: its seeds and those of training are two sets
without a common member.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import error as StructError
from struct import pack

from atropos_gym.errors import ConfigError

__all__ = ["chance_seed", "sampling_seed", "start_seed"]

_SAMPLING_BITS = 63
# Simulators often take a C int as their seed, so starts and chance have 31 bits.
_SIMULATOR_BITS = 31


def sampling_seed(
    run: int, group: int, member: int, turn: int, attempt: int = 0, *, evaluation: bool = False
) -> int:
    """Returns the seed of one completion: 63 bits, the same in every process and on every machine.

    Args:
        run: seed of the run.
        group: number of the group.
        member: number of the episode in its group.
        turn: turn of the episode, from 0.
        attempt: how often this turn was asked for before.
        evaluation: draw from evaluation's stream instead of training's.

    Returns:
        An integer in ``[0, 2**63)``; with ``evaluation`` in its upper half, else in its lower one.

    Example:
        >>> sampling_seed(0, 12, 3, 0)
        2704944296954391742
        >>> sampling_seed(0, 12, 3, 0, evaluation=True) >= 2**62
        True
    """
    return _seed(b"sampling", (run, group, member, turn, attempt), _SAMPLING_BITS, evaluation)


def start_seed(run: int, group: int, *, evaluation: bool = False) -> int:
    """Returns the seed with which every episode of a group is reset: 31 bits, as simulators want it.

    Example:
        >>> start_seed(0, 12)
        550897042
    """
    return _seed(b"start", (run, group), _SIMULATOR_BITS, evaluation)


def chance_seed(run: int, group: int, member: int, *, evaluation: bool = False) -> int:
    """Returns the seed of what happens to one member after the common start: 31 bits.

    Example:
        >>> chance_seed(0, 12, 3) != chance_seed(0, 12, 4)
        True
    """
    return _seed(b"chance", (run, group, member), _SIMULATOR_BITS, evaluation)


def _seed(purpose: bytes, numbers: tuple[int, ...], bits: int, evaluation: bool) -> int:
    """Hashes ``numbers`` for one purpose; the highest of ``bits`` says whether it is evaluation's."""
    try:
        where = pack(f"<{len(numbers)}q", *numbers)
    except StructError as error:
        raise ConfigError(
            f"the seed and every number it is combined with must be 64-bit integers, got {numbers}"
        ) from error
    digest = int.from_bytes(blake2b(where, digest_size=8, person=purpose).digest(), "little")
    low = digest & ((1 << (bits - 1)) - 1)
    return low | (1 << (bits - 1)) if evaluation else low
