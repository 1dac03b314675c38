"""Entropy over the answers that can be legal, instead of over the whole vocabulary.

Over the vocabulary a bonus rewards nonsense and destroys the format; over the few legal answers it keeps the
choice open and leaves the format alone. The answers' ids form a trie; at each sampled position whose prefix
within the turn lies in the trie, the entropy is that of the node's children, renormalised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from atropos_gym.errors import ConfigError
from atropos_gym.trainers.batches import Row

__all__ = ["AnswerTrie", "branch_entropy"]


class AnswerTrie:
    """All replies that can be legal, as ids.

    Attributes:
        children: prefix -> the ids that can follow it, ascending.

    Raises:
        ConfigError: fewer than two answers: there is no choice whose entropy could be kept.

    Example:
        >>> AnswerTrie([[104, 258], [115, 258]]).children[()]
        (104, 115)
    """

    def __init__(self, answers: Iterable[Sequence[int]]) -> None:
        following: dict[tuple[int, ...], set[int]] = {}
        distinct = {tuple(answer) for answer in answers}
        if len(distinct) < 2:
            raise ConfigError(
                f'entropy over "answers" needs at least two answers, the environment has {len(distinct)}; '
                'use entropy=(coefficient, "ids")'
            )
        for answer in distinct:
            for k, token in enumerate(answer):
                following.setdefault(answer[:k], set()).add(token)
        self.children = {prefix: tuple(sorted(ids)) for prefix, ids in following.items()}

    def branches(self, row: Row) -> list[tuple[int, tuple[int, ...]]]:
        """Returns ``(position, children)`` wherever the row's policy had a choice between answers."""
        found = []
        ids = row.ids.tolist()
        for start, end in row.turns:
            for position in range(start, end):
                children = self.children.get(tuple(ids[start:position]))
                if children is None:  # the turn has left the answers
                    break
                if len(children) > 1:
                    found.append((position, children))
        return found


def branch_entropy(logits_QV: Tensor, children_QK: Tensor) -> Tensor:
    """Returns the entropy over each branch's children, renormalised, ``[Q]`` in nats.

    Args:
        logits_QV: logits at the branching positions, temperature applied.
        children_QK: int64 ids of the children, padded with -1.
    """
    absent_QK = children_QK < 0
    logits_QK = logits_QV.gather(1, children_QK.clamp(min=0)).masked_fill(absent_QK, -torch.inf)
    logp_QK = logits_QK.log_softmax(-1)
    # Select before multiplying: the absent children have p = 0 and log p = -inf.
    finite_QK = logp_QK.masked_fill(absent_QK, 0.0)
    return -(finite_QK.exp().masked_fill(absent_QK, 0.0) * finite_QK).sum(-1)
