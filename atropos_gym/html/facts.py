"""What is said in words of turns, episodes and groups; the page and the terminal form say the same.

A fact is a text and a tone: ``good``, ``bad`` or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from atropos_gym.html.records import ShownEpisode, ShownGroup, ShownTurn

__all__ = ["Fact", "Tone", "episode_facts", "group_facts", "number", "score_fact", "turn_facts"]

Tone = Literal["", "good", "bad"]
Fact = tuple[str, Tone]

#: Entries of ``info`` that are shown in places of their own, or say what can be seen anyway.
_SHOWN_APART = {
    "segment", "turn", "max_new_tokens", "action_mask", "legal_actions", "invalid", "invalid_reason",
    "reward_terms", "success", "is_success", "end_reason",
}  # fmt: skip


def turn_facts(turn: ShownTurn) -> list[Fact]:
    """Returns what is known of a turn beside its ids: reward and terms, why invalid, remarks, version.

    Example:
        >>> turn_facts(ShownTurn(0, 2, -1.0, 3, info={"invalid": True, "invalid_reason": "no_container"}))
        [('reward −1', 'bad'), ('invalid: no_container', 'bad'), ('version 3', '')]
    """
    facts: list[Fact] = []
    if turn.reward is not None:
        facts.append(score_fact(turn.reward, "reward"))
    terms = turn.info.get("reward_terms")
    if isinstance(terms, Mapping):
        facts += [(f"{name} {_value(value)}", "") for name, value in terms.items()]
    if turn.invalid:
        reason = turn.info.get("invalid_reason")
        facts.append((f"invalid: {reason}" if reason else "invalid", "bad"))
    if turn.cut:
        facts.append(("cut: no end id", "bad"))
    facts += [(f"{k}: {_value(v)}", "") for k, v in turn.info.items() if k not in _SHOWN_APART]
    if turn.legal_actions is not None:
        facts.append((f"legal: {', '.join(map(str, turn.legal_actions))}", ""))
    if turn.version is not None:
        facts.append((f"version {turn.version}", ""))
    return facts


def episode_facts(episode: ShownEpisode) -> list[Fact]:
    """Returns what is known of an episode: score, advantage, turns, how it ended."""
    facts: list[Fact] = []
    if episode.score is not None:
        facts.append(score_fact(episode.score, "score"))
    if episode.advantage is not None:
        facts.append((f"advantage {number(episode.advantage)}", ""))
    if episode.episode_return is not None and episode.episode_return != episode.score:
        facts.append((f"return {number(episode.episode_return)}", ""))
    if turns := len(episode.turns):
        facts.append((f"{turns} turn{'s' if turns > 1 else ''}", ""))
    if len(episode.rows) > 1:
        facts.append((f"{len(episode.rows)} segments", ""))
    if episode.success is not None:
        facts.append(("solved", "good") if episode.success else ("not solved", "bad"))
    if episode.end_reason:
        facts.append((f"ended: {episode.end_reason}", ""))
    if episode.truncated:
        facts.append(("truncated", "bad"))
    if episode.invalid_turns:
        plural = "s" if episode.invalid_turns > 1 else ""
        facts.append((f"{episode.invalid_turns} invalid turn{plural}", "bad"))
    if episode.cut or any(turn.cut for turn in episode.turns):
        facts.append(("cut", "bad"))
    return facts


def group_facts(group: ShownGroup) -> list[Fact]:
    """Returns what is known of a group beside its title: seed, temperature, and its scores together."""
    facts: list[Fact] = [(f"seed {group.seed}", "")] if group.seed is not None else []
    if group.temperature is not None:
        facts.append((f"temperature {group.temperature:g}", ""))
    scores = group.scores
    if scores:
        facts.append((f"mean score {number(sum(scores) / len(scores))}", ""))
    if len(scores) > 1 and min(scores) == max(scores):
        facts.append(("all scores equal: nothing to learn from", "bad"))
    return facts


def score_fact(score: float, label: str = "") -> Fact:
    """Returns a score as a fact, good above and bad below zero."""
    return f"{label} {number(score)}".strip(), "good" if score > 0 else "bad" if score < 0 else ""


def number(value: float) -> str:
    """Returns a signed number with a true minus.

    Example:
        >>> number(-0.5), number(1), number(0)
        ('−0.5', '+1', '0')
    """
    return f"{value:+.4g}".replace("-", "\N{MINUS SIGN}") if value else "0"


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
