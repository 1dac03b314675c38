"""Penalties on how long a completion is and how much it repeats itself; from 0.0 down.

Each is a pure function of the assistant's text, and of its number of ids where a formula speaks of tokens.
"""

from __future__ import annotations

from atropos_gym.errors import ConfigError

__all__ = ["length_penalty", "overlong_penalty", "repetition_penalty"]


def length_penalty(completion: str, *, limit: int, slack: int) -> float:
    """Returns 0.0 up to ``limit`` characters, then a straight line down to -1.0 at ``limit + slack``.

    Raises:
        ConfigError: ``limit`` or ``slack`` cannot be used.

    Example:
        >>> length_penalty("abc", limit=4, slack=4), length_penalty("abcdef", limit=4, slack=4)
        (0.0, -0.5)
    """
    if limit < 0 or slack < 1:
        raise ConfigError(f"limit must be >= 0 and slack >= 1, got limit={limit}, slack={slack}")
    over = len(completion) - limit
    return -min(1.0, over / slack) if over > 0 else 0.0


def overlong_penalty(completion: str, *, length: int, max_length: int, buffer: int) -> float:
    """Returns DAPO's soft overlong punishment of a completion of ``length`` ids.

    ``0`` up to ``max_length - buffer``, ``((max_length - buffer) - length) / buffer`` up to ``max_length``,
    ``-1`` above (Yu et al. 2025, arXiv:2503.14476, equation 13; there ``L_max`` and ``L_cache``).

    Args:
        completion: the assistant's text; only its length counts.
        length: number of ids of the completion.
        max_length: most ids that go unpunished in full.
        buffer: width of the slope before ``max_length``, in ids.

    Raises:
        ConfigError: not ``0 < buffer <= max_length``, or a negative length.

    Example:
        >>> [overlong_penalty("…", length=n, max_length=100, buffer=20) for n in (80, 90, 100, 101)]
        [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= max_length or length < 0:
        raise ConfigError(
            "buffer must be from 1 to max_length and length >= 0, got"
            f" buffer={buffer}, max_length={max_length}, length={length}"
        )
    over = length - (max_length - buffer)
    return -min(1.0, over / buffer) if over > 0 else 0.0


def repetition_penalty(completion: str, *, ngram: int = 3, max_penalty: float = 1.0) -> float:
    """Returns the share of n-grams of words that repeat an earlier one, times ``-max_penalty``.

    ``-max_penalty * (1 - distinct n-grams / all n-grams)``, words in lower case, split at blanks; 0.0 where
    there are fewer than ``ngram`` words (Yeo et al. 2025, arXiv:2502.03373, appendix; as
    ``get_repetition_penalty_reward`` of TRL and open-r1).

    Raises:
        ConfigError: ``ngram`` below 1, or ``max_penalty`` below 0.

    Example:
        >>> repetition_penalty("a b c a b c", ngram=3), repetition_penalty("one two three four")
        (-0.25, 0.0)
    """
    if ngram < 1 or max_penalty < 0:
        raise ConfigError(
            f"ngram must be >= 1 and max_penalty >= 0, got ngram={ngram}, max_penalty={max_penalty}"
        )
    words = completion.lower().split()
    grams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
    return max_penalty * (len(set(grams)) / len(grams) - 1) if grams else 0.0
