"""What every group of a session must hold, and engines whose replies are ids that nobody would write."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from atropos_gym.engines import Completion, SamplingParams, ScriptedEngine
from atropos_gym.engines.scripted import Call
from atropos_gym.rollout.episode import UNTRAINED_LOGPROB, UNTRAINED_MASK, EpisodeGroup
from tests.unit.rollout_cases import END

#: A template in the manner of Qwen's: tools in the system turn, calls between tags, results a user's turn.
CALLS = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    'Call one as <tool_call>\n{"name": …, "arguments": …}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def check_group(group: EpisodeGroup, calls: Sequence[Call], *, cut: bool = False) -> int:
    """Holds a group against what the engine sampled, position by position; returns how many turns it trains.

    Args:
        group: of a session.
        calls: the engine's.
        cut: turns may be the beginning of what was sampled (stop strings).
    """
    turns: list[Turn] = []
    for episode in group.episodes:
        for row in episode.rows:
            assert len(row.ids) == len(row.mask) == len(row.logprobs)
            trained = {i for turn in row.turns for i in range(turn.start, turn.end)}
            for i, (id_, mark, logprob) in enumerate(zip(row.ids, row.mask, row.logprobs, strict=True)):
                assert mark == (id_ if i in trained else UNTRAINED_MASK)
                assert i in trained or logprob == UNTRAINED_LOGPROB
            assert trained, "a row that trains nothing"
            assert row.turns[-1].end == len(row.ids)
            turns += [
                (
                    tuple(row.ids[: t.start]),
                    tuple(row.ids[t.start : t.end]),
                    tuple(row.logprobs[t.start : t.end]),
                )
                for t in row.turns
            ]
    match_turns(turns, calls, cut=cut)
    return len(turns)


Turn = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Prompt ids, sampled ids and their logprobs."""


def match_turns(turns: Sequence[Turn], calls: Sequence[Call], *, cut: bool = False) -> None:
    """Finds for each turn a sample of its own: equal to it, or (``cut``) longer than it."""
    left: Counter[Turn] = Counter()
    for call in calls:
        if isinstance(call.outcome, Completion) and call.outcome.logprobs is not None:
            left[call.prompt_ids, call.outcome.ids, call.outcome.logprobs] += 1
    # Whole ones first: what is left over for those that were cut is then longer than they are.
    unmatched = []
    for turn in turns:
        if left[turn] > 0:
            left[turn] -= 1
        else:
            unmatched.append(turn)
    assert cut or not unmatched, "a turn that was not sampled, or one that is trained twice"
    for prompt, ids, logprobs in unmatched:
        size = len(ids)
        longer = [
            one
            for one, count in left.items()
            if count > 0 and (one[0], one[1][:size], one[2][:size]) == (prompt, ids, logprobs)
        ]
        assert longer, "a turn that was not sampled, or one that is trained twice"
        left[longer[0]] -= 1


def babbling(seed: int = 0, longest: int = 6, **options: Any) -> ScriptedEngine:
    """An engine that says random ids, control ids among them; often the same short ones."""

    def script(prompt: tuple[int, ...], params: SamplingParams, number: int) -> list[int]:
        chance = random.Random(f"{seed} {number}")
        size = chance.randrange(longest + 1)
        letters = [97, 98, 98, 98, 32, 32, 32, 10, 0xF0, 0x9F, 260, 262]
        ids = [chance.choice(letters) for _ in range(size)]
        return [*ids, END] if chance.random() < 0.7 else ids

    return ScriptedEngine(script, **options)
