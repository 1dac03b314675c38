"""TokenSequence: the space of token-id sequences.

A member is a 1-D integer array of bounded length. The class is a stacked ``Sequence`` with ``shape=()`` and
``dtype=object``: the one form that Gymnasium's vector environments and checkers and Stable-Baselines3 all
accept without padding.

What cannot hold sequences of different lengths refuses them, or should not be used:

* ``AsyncVectorEnv`` with shared memory, its default, raises ``TypeError``: pass ``shared_memory=False``.
* Vector environments with ``observation_mode="different"`` raise ``TypeError``.
* Stable-Baselines3's ``SubprocVecEnv`` stacks prompts: unequal lengths raise ``ValueError``, equal ones
  become an array of two dimensions. Use ``DummyVecEnv``.
* Its ``VecCheckNan``, ``VecFrameStack`` and ``VecNormalize(norm_obs=True)`` raise.
* ``flatten`` (and so ``FlattenObservation``) is one-hot: ``length * vocab_size`` numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

__all__ = ["TokenSequence"]


class TokenSequence(spaces.Sequence):
    """Sequences of token ids: ids in ``[0, vocab_size)``, ``min_length`` to ``max_length`` of them.

    Members are 1-D int32 arrays; ``contains`` also takes other integer arrays and lists or tuples of ints.

    Args:
        vocab_size: number of ids, >= 1.
        max_length: most ids in a member, >= 0.
        min_length: fewest ids in a member, 0 to ``max_length``.
        seed: of the space's own generator.

    Raises:
        TypeError: a bound that is no integer, named.
        ValueError: a bound that cannot hold, named.

    Example:
        >>> space = TokenSequence(264, max_length=4, seed=0)
        >>> [1, 2] in space, [264] in space, [0.0] in space
        (True, False, False)
        >>> space
        TokenSequence(264, max_length=4)
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        min_length: int = 0,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        self.vocab_size = _integer("vocab_size", vocab_size)
        self.max_length = _integer("max_length", max_length)
        self.min_length = _integer("min_length", min_length)
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be >= 1, got {vocab_size}")
        if not 0 <= self.min_length <= self.max_length:
            raise ValueError(
                f"lengths must satisfy 0 <= min_length <= max_length, got {min_length} and {max_length}"
            )
        super().__init__(spaces.Discrete(self.vocab_size), seed=seed, stack=True)
        # Sequence leaves both None, and SB3's buffers are np.zeros((n, *shape), dtype): () and object make
        # them arrays of n slots, one sequence each.
        self._shape = ()
        self.dtype = np.dtype(object)

    def contains(self, x: Any) -> bool:
        """Returns whether ``x`` is a 1-D integer array, list or tuple within the bounds."""
        if isinstance(x, np.ndarray):
            if x.ndim != 1 or x.dtype.kind not in "iu" or not self.min_length <= x.size <= self.max_length:
                return False
            return x.size == 0 or bool(x.min() >= 0 and x.max() < self.vocab_size)
        if not isinstance(x, (list, tuple)) or not self.min_length <= len(x) <= self.max_length:
            return False
        return all(_is_int(item) and 0 <= item < self.vocab_size for item in x)

    def sample(
        self,
        mask: tuple[Any, NDArray[np.integer[Any]] | None] | None = None,
        probability: tuple[Any, NDArray[np.floating[Any]] | None] | None = None,
    ) -> NDArray[np.int32]:
        """Draws a member: length uniform over the bounds, ids uniform, unless told otherwise.

        Args:
            mask: ``(length, allowed)``: ``length`` is an int, an array of ints to draw from, or None;
                ``allowed`` is an int array of shape ``(vocab_size,)``, nonzero where an id may be drawn.
            probability: ``(length, weights)``: as above with weights of shape ``(vocab_size,)`` that sum
                to 1. Never both.

        Returns:
            int32 array of shape ``(length,)``.

        Raises:
            TypeError: a length that is no integer.
            ValueError: both given, or a length or weights that fit no member.
        """
        if mask is not None and probability is not None:
            raise ValueError("give mask= or probability=, not both")
        wanted, weights = mask or probability or (None, None)
        length = self._draw_length(wanted)
        if weights is None:
            return self.np_random.integers(0, self.vocab_size, size=length, dtype=np.int32)
        chances = np.asarray(weights, dtype=np.float64)
        if chances.shape != (self.vocab_size,):
            raise ValueError(f"weights of ids must have shape ({self.vocab_size},), got {chances.shape}")
        if mask is not None:
            chances = (chances != 0).astype(np.float64)
            if length and not chances.any():
                raise ValueError("the mask allows no id")
            chances /= max(chances.sum(), 1.0)
        if length == 0:
            return np.zeros(0, dtype=np.int32)
        return self.np_random.choice(self.vocab_size, size=length, p=chances).astype(np.int32)

    def _draw_length(self, wanted: Any) -> int:
        """Returns a length: drawn from the bounds (None), from an array, or the given int, checked."""
        if wanted is None:
            return int(self.np_random.integers(self.min_length, self.max_length + 1))
        length = _integer("length", self.np_random.choice(wanted) if np.ndim(wanted) else wanted)
        if not self.min_length <= length <= self.max_length:
            raise ValueError(f"length must be in [{self.min_length}, {self.max_length}], got {length}")
        return length

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[list[int]]:
        """Returns a batch of members as lists of ints.

        Example:
            >>> TokenSequence(9, 3).to_jsonable([np.array([1, 2])])
            [[1, 2]]
        """
        return [np.asarray(sample).tolist() for sample in sample_n]

    def from_jsonable(self, sample_n: list[list[Any]]) -> list[Any]:
        """Returns a batch of lists of ints as int32 arrays."""
        return [np.asarray(sample, dtype=np.int32) for sample in sample_n]

    def __eq__(self, other: object, /) -> bool:
        """Returns whether ``other`` is a TokenSequence with the same bounds."""
        return (
            isinstance(other, TokenSequence)
            and self.vocab_size == other.vocab_size
            and self.min_length == other.min_length
            and self.max_length == other.max_length
        )

    def __repr__(self) -> str:
        """Returns a short form: it stands in every error about the space."""
        shortest = f", min_length={self.min_length}" if self.min_length else ""
        return f"TokenSequence({self.vocab_size}, max_length={self.max_length}{shortest})"


def _integer(name: str, value: Any) -> int:
    """Returns a bound or a length as an int; a float would be cut in silence."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


def _is_int(value: Any) -> bool:
    """Returns whether ``value`` is an integer and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
