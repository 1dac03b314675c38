"""The bodies of the HTTP API (the Atropos rollout API and what our server adds), as pydantic models.

Shapes: ``[n][len]`` is a list per sequence of a list per token; n sequences make a group.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["ScoredDataGroup"]


class ScoredDataGroup(BaseModel):
    """One group: n sequences sampled from one start, with their scores. Keys are those of the wire.

    Attributes:
        tokens: int ``[n][len]``, prompt and sampled ids, unpadded.
        masks: int ``[n][len]``, -100 where not trained, else the id itself; not shifted.
        scores: float ``[n]``, one reward a sequence.
        advantages: float ``[n][len]`` or None; per-token advantages that win over scores.
        ref_logprobs: float ``[n][len]`` or None.
        messages: ``[n][turns]`` of role/content dicts or None.
        generation_params: sampling settings of the group; ``temperature`` is read by trainers.
        inference_logprobs: float ``[n][len]``; 1.0 at every untrained position.
        overrides: one dict a sequence or None.
        group_overrides: free keys of the group or None.
        images: opaque.
        env_id: the sender's registration.
        distill_token_ids: int ``[n][len][k]`` or None.
        distill_logprobs: float ``[n][len][k]`` or None.
    """

    model_config = ConfigDict(extra="ignore")

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
