"""Legal replies only: what an environment says can be said now, as the choices that an engine samples from.

Choices are whole replies: where a task requires thinking, or a generation prompt opens it, the thought is the
one that ``TextEnv.say`` writes, and none of the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import ConfigError

__all__ = ["LegalReplies"]

#: So many sets of replies are remembered with their ids.
_MOST = 1024


class LegalReplies:
    """Narrows the sampling of each turn to the replies that are legal in it.

    Args:
        env: the environment's name, for errors.

    Example:
        >>> legal = LegalReplies("Coin")
        >>> legal.narrowed(SamplingParams(max_tokens=2), ("h", "t"), lambda text: [ord(text), 258]).choices
        ((104, 258), (116, 258))
    """

    def __init__(self, env: str) -> None:
        self._env = env
        self._ids: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def narrowed(
        self,
        sampling: SamplingParams,
        replies: Sequence[str] | None,
        say: Callable[[str], Sequence[int]],
    ) -> SamplingParams:
        """Returns the sampling of one turn.

        Args:
            sampling: without choices.
            replies: of ``TextEnv.legal_replies``; one at least.
            say: writes one as ids; the same for all turns.

        Raises:
            ConfigError: the environment does not say what is legal, or a legal reply does not fit in
                ``max_tokens``.
        """
        if replies is None:
            raise ConfigError(
                f"{self._env} does not say which replies are legal, as legal_only needs: a simulator gives "
                "info['action_mask'] or few discrete actions in a declared format, a TextEnv has answers or "
                "legal_replies()"
            )
        if isinstance(replies, str):
            raise ConfigError(
                f"{self._env}: legal_replies() must return a tuple of texts, got {replies!r:.60}"
            )
        known = tuple(replies)
        choices = self._ids.get(known)
        if choices is None:
            choices = tuple(tuple(say(reply)) for reply in known)
            if len(self._ids) < _MOST:
                self._ids[known] = choices
        for reply, choice in zip(known, choices, strict=True):
            if len(choice) > sampling.max_tokens:
                raise ConfigError(
                    f"{self._env}: the legal reply {reply!r:.60} has {len(choice)} ids, and a turn has "
                    f"{sampling.max_tokens}: raise max_turn_tokens (and max_tokens of the sampling)"
                )
        return sampling.with_(choices=choices)
