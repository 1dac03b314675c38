"""Penalties, masks and filters against a reference in numpy; uniforms against their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.engines._sampling import Sampler, processed_logits, stream_keys, uniforms
from atropos_gym.engines.base import SamplingParams
from atropos_gym.engines.hf import HFEngine
from atropos_gym.errors import ConfigError
from tests.tools.tiny_llama import full_logits, prompts_of, tiny_llama

MASK = (1 << 64) - 1


def reference(x: np.ndarray, p: SamplingParams, prompt: list[int], sampled: list[int]) -> np.ndarray:
    """The logprobs that ``p`` asks for, one id at a time."""
    x = [float(v) for v in x]
    for i in range(len(x)):
        if p.allowed_ids is not None and i not in p.allowed_ids:
            x[i] = -np.inf
        if len(sampled) < p.min_tokens and i in p.stop_ids:
            x[i] = -np.inf
        if i in prompt or i in sampled:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        x[i] -= p.frequency_penalty * sampled.count(i) + p.presence_penalty * (i in sampled)
    y = np.array(x) / p.temperature
    if p.min_p:
        y[np.exp(y - y.max()) < p.min_p] = -np.inf
    order = np.argsort(-y, kind="stable")
    if p.top_k > 0:
        y[order[p.top_k :]] = -np.inf
    if p.top_p < 1:
        probability = np.exp(y - y.max()) / np.exp(y - y.max()).sum()
        held = 0.0
        for i in order:
            if held >= p.top_p:
                y[i] = -np.inf
            held += probability[i]
    y = y - y.max()
    with np.errstate(divide="ignore"):
        return y - np.log(np.exp(y).sum())


CASES = [
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.7},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8},
    {"frequency_penalty": -0.5},
    {"min_tokens": 4, "stop_ids": (1, 5)},
    {"min_tokens": 3, "stop_ids": (1, 5)},
    {"allowed_ids": (3, 4, 11)},
    {"allowed_ids": (7,)},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9, "repetition_penalty": 1.1},
    {"allowed_ids": (1, 2, 3, 4), "min_tokens": 9, "stop_ids": (2,), "presence_penalty": 1.0, "top_p": 0.95},
]


@pytest.mark.parametrize("changes", CASES, ids=lambda c: ",".join(c))
def test_processed_logits_equal_the_reference(changes: dict) -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=8, **changes)
    for _ in range(5):
        x = rng.normal(size=12).astype(np.float32) * 2
        prompt, sampled = rng.integers(0, 12, 4).tolist(), rng.integers(0, 12, 3).tolist()
        got = processed_logits(torch.from_numpy(x), params, prompt, sampled).log_softmax(-1).numpy()
        np.testing.assert_allclose(got, reference(x, params, prompt, sampled), atol=1e-5)


@pytest.mark.parametrize("changes", CASES, ids=lambda c: ",".join(c))
def test_the_engine_samples_from_the_processed_distribution(changes: dict) -> None:
    model = tiny_llama()
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes")
    [prompt] = prompts_of([7])
    params = SamplingParams(max_tokens=6, seed=3, **changes)
    for c in engine.generate_sync(prompt, params, n=3):
        logits = full_logits(model, prompt, c.ids).numpy()
        for i, (sampled, logprob) in enumerate(zip(c.ids, c.logprobs or (), strict=True)):
            wanted = reference(logits[i], params, prompt, list(c.ids[:i]))
            assert logprob == pytest.approx(wanted[sampled], abs=2e-4)
        assert isinstance(c.trainable, str) and c.trainable.split("=")[0] in changes
        if params.min_tokens:
            assert not set(c.ids[: params.min_tokens]) & set(params.stop_ids)


def test_plain_and_processed_requests_share_a_batch() -> None:
    model = tiny_llama()
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes")
    [prompt] = prompts_of([7])
    each = [SamplingParams(max_tokens=8, seed=i, **c) for i, c in enumerate([{}, *CASES, {"temperature": 0}])]
    together = engine.generate_batch([prompt] * len(each), each)
    for params, c in zip(each, together, strict=True):
        assert c.ids == engine.generate_sync(prompt, params)[0].ids


def test_greedy_requests_obey_masks_and_penalties() -> None:
    model = tiny_llama()
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes")
    greedy = SamplingParams(max_tokens=5, temperature=0)
    [free] = engine.generate_sync([1, 2, 3], greedy)
    [masked] = engine.generate_sync([1, 2, 3], greedy.with_(allowed_ids=(65, 66)))
    assert set(masked.ids) <= {65, 66}
    [stops] = engine.generate_sync([1, 2, 3], greedy.with_(stop_ids=(free.ids[0],), min_tokens=2))
    assert len(stops.ids) >= 2 and stops.ids[0] != free.ids[0]


def splitmix64(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 100_000))
@settings(deadline=None, max_examples=100)
def test_uniforms_are_splitmix64_of_seed_child_and_position(seed: int, child: int, position: int) -> None:
    gamma = 0x9E3779B97F4A7C15
    key = splitmix64((splitmix64((seed + gamma) & MASK) + (child + 1) * 0xD1B54A32D192ED03) & MASK)
    wanted = (splitmix64((key + (position + 1) * gamma) & MASK) >> 11) * 2.0**-53
    assert uniforms(stream_keys([seed], [child]), position)[0] == wanted
    assert 0 <= wanted < 1


def test_uniforms_are_uniform_and_do_not_move_together() -> None:
    keys = stream_keys(list(range(300)) * 3, [0] * 300 + [1] * 300 + [2] * 300)
    table = np.stack([uniforms(keys, position) for position in range(100)])
    assert abs(table.mean() - 0.5) < 4 * np.sqrt(1 / 12 / table.size)
    counts = np.histogram(table, bins=50, range=(0, 1))[0]
    expected = table.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * np.sqrt(98)
    for shifted in (table[:, 1:], np.roll(table, 300, axis=1), np.roll(table, 1, axis=0)):
        assert abs(np.corrcoef(table[:, : shifted.shape[1]].ravel(), shifted.ravel())[0, 1]) < 0.02


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=20), st.integers(0, 2**63 - 1))
@settings(deadline=None, max_examples=100)
def test_draws_invert_the_cumulated_probabilities(logits: list[float], seed: int) -> None:
    params = SamplingParams(max_tokens=1)
    sampler = Sampler([params], [[0]], [seed], [0])
    ids, logprobs = sampler.draw(torch.tensor([logits]), np.array([0]), np.array([0]), 0, [])
    p = np.exp(torch.tensor(logits).log_softmax(-1).double().numpy())
    u = uniforms(stream_keys([seed], [0]), 0)[0] * p.sum()
    below = p[: ids[0]].sum()
    assert below <= u + 1e-12 and u < below + p[ids[0]] + 1e-12
    assert logprobs[0] == pytest.approx(np.log(p[ids[0]]), abs=1e-5) and logprobs[0] <= 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"allowed_ids": ()}, "allowed_ids"),
    ],
)
def test_parameters_out_of_range_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**{"max_tokens": 1, **changes})
