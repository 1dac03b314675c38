"""The in-process engine on a real model: equal to a plain forward, versions told apart, a quick exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from atropos_gym.engines.base import Completion, SamplingParams
from atropos_gym.engines.hf import HFEngine
from tests.tools.tiny_llama import adapter_tensors, full_logprobs, write_adapter

pytestmark = pytest.mark.slow

QUESTIONS = [
    "What is the capital of France?",
    "hi",
    "Tom has 3 apples and buys 4 more. How many apples does he have now? Explain each step.",
    "Write one sentence about the sea.",
]


@pytest.mark.timeout(900)
def test_engine_and_learner_agree_on_a_real_model(smollm2_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer=smollm2_folder, seed=0)
    assert engine._decoder is not None
    mine = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in engine._decoder._model.parameters()} == mine

    # Version 2 is version 1 after a small step, as a learner's next one would be.
    tensors = adapter_tensors(model, rank=8, std=0.02, seed=1)
    stepped = {k: t + 1e-3 * torch.randn_like(t) * ("lora_B" in k) for k, t in tensors.items()}
    for version, weights in ((1, tensors), (2, stepped)):
        engine.publish_sync(version, write_adapter(tmp_path / f"v{version}", weights, rank=8, alpha=16))

    template = AutoTokenizer.from_pretrained(smollm2_folder)
    prompts = [
        template.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in QUESTIONS
    ]
    asked = [(p, v, t) for p in prompts for v in (0, 1, 2) for t in (0.7, 1.0)]

    async def sample() -> list[Completion]:
        requests = (
            engine.generate(p, SamplingParams(16, temperature=t, seed=i, stop_ids=(2,)), version=v)
            for i, (p, v, t) in enumerate(asked)
        )
        return [answer[0] for answer in await asyncio.gather(*requests)]

    completions = asyncio.run(sample())
    engine_says = [np.array(c.logprobs) for c in completions]
    scorer = PeftModel.from_pretrained(model, tmp_path / "v1", adapter_name="1")
    scorer.load_adapter(tmp_path / "v2", adapter_name="2")
    scorer.eval()

    def pairs(values: list) -> list[tuple]:
        return list(zip(values, completions, strict=True))

    def score(version: int) -> list[np.ndarray]:
        """A plain forward's logprobs of every completion, all under one version."""
        if version == 0:
            with scorer.disable_adapter():
                return [full_logprobs(scorer, p, c.ids, t) for (p, _, t), c in pairs(asked)]
        scorer.set_adapter(str(version))
        return [full_logprobs(scorer, p, c.ids, t) for (p, _, t), c in pairs(asked)]

    scores = {version: score(version) for version in (0, 1, 2)}
    right = np.concatenate([e - scores[c.version][i] for i, (e, c) in enumerate(pairs(engine_says))])
    assert np.abs(right).mean() < 2e-5
    assert np.abs(right).max() < 2e-4
    under_1 = [i for i, c in enumerate(completions) if c.version == 1]
    wrong = np.concatenate([engine_says[i] - scores[0][i] for i in under_1])  # the adapter not applied
    assert np.abs(wrong).mean() > 100 * np.abs(right).mean()

    # The slope test: 1 where the engine serves version 2, 0 where it still served version 1.
    for served, slope in ((2, 1.0), (1, 0.0)):
        rows = [i for i, c in enumerate(completions) if c.version == served]
        x = np.concatenate([scores[2][i] - scores[1][i] for i in rows])
        y = np.concatenate([engine_says[i] - scores[1][i] for i in rows])
        assert np.sqrt((x**2).mean()) > 1e-4
        assert (x @ y) / (x @ x) == pytest.approx(slope, abs=0.02)


EXIT = """
import threading, time
from atropos_gym.engines.base import SamplingParams
from atropos_gym.engines.hf import HFEngine
from tests.tools.tiny_llama import tiny_llama
model = tiny_llama(max_position_embeddings=10**7)
engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes")
ask = lambda: engine.generate_sync([1, 2], SamplingParams(max_tokens=10**6))
threading.Thread(target=ask, daemon=True).start()
while not engine._decoder.forwards:
    time.sleep(0.01)
"""


def test_the_interpreter_can_leave_while_a_batch_runs() -> None:
    left = subprocess.run(
        [sys.executable, "-c", EXIT], timeout=100, check=False, cwd=Path(__file__).parents[2]
    )
    assert left.returncode == 0
