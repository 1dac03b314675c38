"""Stock vLLM asked for whole replies: one of them comes back, with the masked distribution's logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atropos_gym import evaluate
from atropos_gym.engines import Completion, SamplingParams, VLLMEngine
from atropos_gym.rendering import chat_renderer
from tests.tools.tiny_llama import full_logits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

#: Some begin others (their ends tell them apart), and the model likes several of them.
REPLIES = (
    "Hit",
    "Hit me",
    "Stick",
    "I hit.",
    "I will hit.",
    "I will stick.",
    "I would stick.",
    "<action>hit</action>",
)
#: Of one id's logprob, float32 on both sides; 0.04 is what a forgotten mask or temperature shows.
AGREES = 2e-4


def test_only_choices_are_sampled_with_logprobs_of_what_the_mask_leaves(
    connect: Callable[..., VLLMEngine], smollm2_folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    engine = connect()
    renderer = chat_renderer(engine.tokenizer)
    prompt = renderer.prompt([{"role": "user", "content": "You have 12, the dealer shows 6. Hit or stick?"}])
    whole = [tuple(renderer.say(reply)) for reply in REPLIES]
    control = tuple((1, *choice) for choice in whole[2:4])  # <|im_start|> first: an id that no text gives
    params = SamplingParams(max_tokens=16, seed=5, stop_ids=renderer.stop_ids)

    async def sample() -> list[list[Completion]]:
        asked = [
            params.with_(choices=whole),
            params.with_(choices=whole, temperature=2.0, seed=6),
            params.with_(choices=control),
            params.with_(max_tokens=6),  # beside them, under no mask
        ]
        return await asyncio.gather(*(engine.generate(prompt, one, 12) for one in asked))

    plain, hot, forced, free = asyncio.run(sample())
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    seen = set()
    for samples, choices, temperature in ((plain, whole, 1.0), (hot, whole, 2.0), (forced, control, 1.0)):
        for one in samples:
            assert one.ids in choices and one.finish_reason == "stop" and one.trainable == "choices"
            assert one.logprobs is not None
            seen.add(one.ids)
            logits = full_logits(model, prompt, one.ids) / temperature
            for k, (value, logprob) in enumerate(zip(one.ids, one.logprobs, strict=True)):
                left = sorted({choice[k] for choice in choices if choice[:k] == one.ids[:k]})
                exact = float(logits[k, left].log_softmax(-1)[left.index(value)])
                assert abs(logprob - exact) <= AGREES, (one.ids, k, logprob, exact)
                assert len(left) > 1 or logprob == 0.0
    assert len(seen) > 3, "the test says nothing of choices that are never taken"
    for one in free:
        assert one.trainable is True and one.logprobs is not None
        logits = full_logits(model, prompt, one.ids).log_softmax(-1)
        unmasked = logits[torch.arange(len(one.ids)), list(one.ids)].tolist()
        assert one.logprobs == pytest.approx(unmasked, abs=AGREES)


def test_a_model_that_plays_badly_plays_legally(connect: Callable[..., VLLMEngine]) -> None:
    engine = connect()
    keywords = {"describe": "terse", "history": "latest"}
    for deterministic in (True, False):
        result = evaluate(
            "atropos/Blackjack-v0",
            engine,
            4,
            seed=1,
            deterministic=deterministic,
            env_kwargs=keywords,
            legal_only=True,
        )
        assert result.valid == 1.0 and result.episodes == 4
