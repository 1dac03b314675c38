"""Locks what sampling in process means.

1. Logprobs are those of the distribution each id was drawn from, at any temperature.
2. A sample depends on its own request, not on what shares the batch.
3. Equal prefixes pass through the model once; versions share a batch.
4. Whatever fails, every caller is told and the engine lives on.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MistralConfig

from atropos_gym.engines import make_engine
from atropos_gym.engines._sampling import stream_keys, uniforms
from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.engines.hf import HFEngine
from atropos_gym.errors import ConfigError, EngineError, MissingData
from tests.tools.tiny_llama import (
    adapter_tensors,
    full_logits,
    full_logprobs,
    prompts_of,
    tiny_llama,
    write_adapter,
)

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34, 40, 40, 7, 7, 29, 30, 31, 4]
STOP = 258


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def engine(model: LlamaForCausalLM) -> HFEngine:
    return HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes", seed=0)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": 7, **changes})  # type: ignore[arg-type]


def merged(model: LlamaForCausalLM, tensors: dict[str, torch.Tensor], scale: float) -> LlamaForCausalLM:
    """A model of its own whose weights hold the adapter: what the engine must agree with."""
    copy = tiny_llama()
    copy.load_state_dict(model.state_dict())
    for key, b in tensors.items():
        if ".lora_B" in key:
            weight = copy.get_submodule(key.split(".lora_B")[0].removeprefix("base_model.model.")).weight
            weight.data += scale * b @ tensors[key.replace("lora_B", "lora_A")]
    return copy


def rows_per_forward(engine: HFEngine) -> list[tuple[int, int]]:
    """Records (rows, columns) of every forward from now on."""
    shapes: list[tuple[int, int]] = []
    decoder = engine._decoder
    assert decoder is not None
    forward = decoder._forward

    def recorded(ids: torch.Tensor, *rest: object) -> torch.Tensor:
        shapes.append((ids.shape[0], ids.shape[1]))
        return forward(ids, *rest)  # type: ignore[arg-type]

    decoder._forward = recorded  # type: ignore[method-assign]
    return shapes


# -- exactness ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_equal_a_plain_forward(
    engine: HFEngine, model: LlamaForCausalLM, temperature: float
) -> None:
    prompts = prompts_of(LENGTHS)
    each = [params(seed=i, temperature=temperature, max_tokens=12) for i in range(len(prompts))]
    completions = engine.generate_batch(prompts, each)
    differences = [
        np.abs(full_logprobs(model, prompt, c.ids, temperature) - np.array(c.logprobs))
        for prompt, c in zip(prompts, completions, strict=True)
    ]
    assert np.mean(np.concatenate(differences)) < 2e-5
    assert np.max(np.concatenate(differences)) < 2e-4
    assert all(len(c.ids) == 12 and c.finish_reason == "length" and c.trainable is True for c in completions)


def test_a_group_of_one_prompt_is_exact_too(engine: HFEngine, model: LlamaForCausalLM) -> None:
    [prompt] = prompts_of([9])
    completions = engine.generate_sync(prompt, params(max_tokens=20), n=16)
    assert len({c.ids for c in completions}) == 16  # children of one seed differ
    for c in completions:
        np.testing.assert_allclose(c.logprobs, full_logprobs(model, prompt, c.ids), atol=2e-4)


def test_ids_are_distributed_as_the_model_says(engine: HFEngine, model: LlamaForCausalLM) -> None:
    [prompt] = prompts_of([6])
    completions = engine.generate_sync(prompt, params(max_tokens=1, temperature=2.0), n=1000)
    p = (full_logits(model, prompt, [0])[0] / 2.0).softmax(-1).numpy()
    count = np.bincount([c.ids[0] for c in completions], minlength=264)
    common = p * 1000 > 5
    z = (count[common] - 1000 * p[common]) / np.sqrt(1000 * p[common] * (1 - p[common]))
    assert common.sum() > 20
    assert np.abs(z).max() < 4


def test_temperature_zero_takes_the_likeliest_and_is_not_trainable(
    engine: HFEngine, model: LlamaForCausalLM
) -> None:
    prompts = prompts_of([3, 30])
    for prompt, c in zip(prompts, engine.generate_batch(prompts, params(temperature=0)), strict=True):
        assert c.ids == tuple(full_logits(model, prompt, c.ids).argmax(-1).tolist())
        assert c.logprobs is None
        assert c.trainable == "temperature=0"


@pytest.mark.parametrize("window", [4, 6])
def test_sliding_window_models_see_their_window_only(window: int) -> None:
    torch.manual_seed(0)
    shape = tiny_llama().config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = MistralConfig(
        **{name: shape[name] for name in names},
        num_key_value_heads=1,
        sliding_window=window,
        max_position_embeddings=96,
        initializer_range=0.25,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = HFEngine(base=model.state_dict(), config=config, tokenizer="bytes")
    prompts = prompts_of([2, 19, 40])
    for prompt, c in zip(prompts, engine.generate_batch(prompts, params(max_tokens=12)), strict=True):
        np.testing.assert_allclose(c.logprobs, full_logprobs(model, prompt, c.ids), atol=2e-4)


def test_tied_embeddings_are_shared_once() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    engine = HFEngine(base=tensors, config=model.config, tokenizer="bytes")
    [prompt] = prompts_of([5])
    [c] = engine.generate_sync(prompt, params())
    np.testing.assert_allclose(c.logprobs, full_logprobs(model, prompt, c.ids), atol=2e-4)


# -- independence ------------------------------------------------------------------------------------------


def test_a_sample_does_not_depend_on_its_batch(engine: HFEngine) -> None:
    prompts = prompts_of(LENGTHS)
    each = [params(seed=100 + i, temperature=0.7 + 0.1 * (i % 3)) for i in range(len(prompts))]
    alone = [engine.generate_sync(p, one)[0] for p, one in zip(prompts, each, strict=True)]
    together = engine.generate_batch(prompts, each)
    backwards = engine.generate_batch(prompts[::-1], each[::-1])[::-1]
    for a, b, c in zip(alone, together, backwards, strict=True):
        assert a.ids == b.ids == c.ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        np.testing.assert_allclose(a.logprobs, c.logprobs, atol=1e-4)


def test_a_plain_loop_samples_the_same_ids(engine: HFEngine, model: LlamaForCausalLM) -> None:
    """No batch, no cache, no trie: a whole forward an id, one request after another."""
    shared = prompts_of([14])[0]
    prompts = [shared[:k] for k in (3, 14, 9)] + [shared[:9] + [7], [7, *shared[:8]]]
    each = [params(seed=i, temperature=0.6 + 0.2 * i, max_tokens=5) for i in range(5)]
    for prompt, one, c in zip(prompts, each, engine.generate_batch(prompts, each), strict=True):
        ids: list[int] = []
        for position in range(5):
            logits = full_logits(model, prompt, [*ids, 0])[-1] / one.temperature
            cdf = logits.double().softmax(-1).cumsum(-1).numpy()
            u = uniforms(stream_keys([one.seed or 0], [0]), position)[0]
            ids.append(int(np.searchsorted(cdf, u, side="right")))
        assert c.ids == tuple(ids)


def test_seeds_decide_samples(engine: HFEngine) -> None:
    [prompt] = prompts_of([8])
    long = params(max_tokens=16, seed=1)
    assert engine.generate_sync(prompt, long) == engine.generate_sync(prompt, long)
    others = [engine.generate_sync(prompt, long.with_(seed=s))[0].ids for s in (2, 3, 2**63 - 1)]
    assert len({engine.generate_sync(prompt, long)[0].ids, *others}) == 4
    unseeded = [engine.generate_sync(prompt, long.with_(seed=None))[0].ids for _ in range(3)]
    assert len(set(unseeded)) == 3


def test_children_of_neighbouring_seeds_differ(engine: HFEngine) -> None:
    [prompt] = prompts_of([8])
    ids = [
        c.ids for seed in (7, 8) for c in engine.generate_sync(prompt, params(seed=seed, max_tokens=12), n=4)
    ]
    assert len(set(ids)) == 8


def test_n_gives_the_same_children_whatever_n_is(engine: HFEngine) -> None:
    [prompt] = prompts_of([8])
    few, many = (engine.generate_sync(prompt, params(max_tokens=12), n=n) for n in (2, 5))
    assert [c.ids for c in few] == [c.ids for c in many[:2]]


# -- batching ----------------------------------------------------------------------------------------------


def test_equal_prompts_are_prefilled_once(engine: HFEngine) -> None:
    shapes = rows_per_forward(engine)
    first, second = prompts_of([9, 9])
    engine.generate_batch([first, second] * 32, params(temperature=0, max_tokens=4))
    assert shapes == [(2, 9), (2, 1), (2, 1), (2, 1)]  # no forward for the last id


def test_samples_part_where_their_ids_part(engine: HFEngine) -> None:
    shapes = rows_per_forward(engine)
    [prompt] = prompts_of([9])
    completions = engine.generate_sync(prompt, params(max_tokens=4), n=64)
    prefixes = [len({c.ids[:k] for c in completions}) for k in (1, 2, 3)]
    assert shapes == [(1, 9), *((n, 1) for n in prefixes)]


def test_concurrent_requests_are_one_batch(engine: HFEngine) -> None:
    sizes: list[int] = []
    run = engine._batcher._run

    def counted(requests: list) -> object:
        sizes.append(len(requests))
        return run(requests)

    engine._batcher._run = counted  # type: ignore[assignment,method-assign]

    async def ask(prompt: list[int], hops: int) -> None:
        for _ in range(hops):
            await asyncio.sleep(0)
        await engine.generate(prompt, params())

    async def main() -> None:
        await asyncio.gather(*(ask(prompt, i % 3) for i, prompt in enumerate(prompts_of([7] * 50))))

    asyncio.run(main())
    assert sizes == [50]


def test_batches_have_at_most_max_batch_samples(model: LlamaForCausalLM) -> None:
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes", max_batch=4)
    shapes = rows_per_forward(engine)
    prompts = prompts_of([5] * 10)
    completions = engine.generate_batch(prompts, params(max_tokens=2))
    assert max(rows for rows, _ in shapes) == 4
    assert [c.ids for c in completions] == [
        engine.generate_sync(p, params(max_tokens=2))[0].ids for p in prompts
    ]


def test_the_event_loop_stays_free_while_a_batch_runs(engine: HFEngine) -> None:
    started, go_on = threading.Event(), threading.Event()
    run = engine._batcher._run

    def held_up(requests: list) -> object:
        started.set()
        assert go_on.wait(60)
        return run(requests)

    engine._batcher._run = held_up  # type: ignore[assignment,method-assign]

    async def main() -> int:
        task = asyncio.create_task(engine.generate([1, 2, 3], params()))
        turns = 0
        while not started.is_set() or turns < 50:
            await asyncio.sleep(0)
            turns += 1
        assert not task.done()
        go_on.set()
        return len((await task)[0].ids)

    assert asyncio.run(main()) == 6


def test_loops_and_threads_share_one_engine(engine: HFEngine) -> None:
    prompts = prompts_of([4, 9, 15])
    wanted = [engine.generate_sync(p, params())[0].ids for p in prompts]
    got: list[tuple[int, tuple[int, ...]]] = []

    async def ask_all() -> None:
        for _ in range(5):
            answers = await asyncio.gather(*(engine.generate(p, params()) for p in prompts))
            got.extend((i, answer[0].ids) for i, answer in enumerate(answers))

    def in_a_loop() -> None:
        asyncio.run(ask_all())

    def without_a_loop() -> None:
        for _ in range(5):
            got.extend((i, c.ids) for i, c in enumerate(engine.generate_batch(prompts, params())))

    threads = [threading.Thread(target=t) for t in (in_a_loop, without_a_loop, in_a_loop)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 45
    assert all(ids == wanted[i] for i, ids in got)


# -- ends --------------------------------------------------------------------------------------------------


def test_each_request_ends_at_its_own_stop_ids(engine: HFEngine) -> None:
    [prompt] = prompts_of([11])
    [free] = engine.generate_sync(prompt, params(max_tokens=8))
    stop = free.ids[3]
    first = free.ids.index(stop)
    each = [params(max_tokens=8, stop_ids=ids) for ids in ((stop,), (), (STOP, stop), (free.ids[0],))]
    ids = [(c.ids, c.finish_reason) for c in engine.generate_batch([prompt] * 4, each)]
    cut = (free.ids[: first + 1], "stop")
    assert ids == [cut, (free.ids, "length"), cut, (free.ids[:1], "stop")]


def test_a_reply_is_cut_to_the_context(engine: HFEngine) -> None:
    long, full, exact = prompts_of([90, 96, 92])
    [cut] = engine.generate_sync(long, params(max_tokens=30))
    assert (len(cut.ids), cut.finish_reason, cut.cut_by_context) == (6, "length", True)
    [fits] = engine.generate_sync(exact, params(max_tokens=4))
    assert (len(fits.ids), fits.cut_by_context) == (4, False)
    with pytest.raises(EngineError, match=r"96 ids and max_context is 96"):
        engine.generate_sync(full, params())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1, 2, 264], "id 264 at position 2, outside the vocabulary of 264"),
        ([-1], "id -1 at position 0"),
        ([1, 2.0], "2.0 at position 1"),
        ([True], "True at position 0"),
        (["a"], "'a' at position 0"),
    ],
)
def test_unusable_prompts_are_named(engine: HFEngine, prompt: list, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        engine.generate_sync(prompt, params())


def test_arrays_are_prompts_too(engine: HFEngine) -> None:
    prompt = [5, 6, 7]
    for form in (np.array(prompt, np.int32), torch.tensor(prompt), tuple(np.int64(i) for i in prompt)):
        assert engine.generate_sync(form, params()) == engine.generate_sync(prompt, params())


def test_unusable_parameters_are_named(engine: HFEngine) -> None:
    with pytest.raises(EngineError, match="stop_ids has id 300 at position 1"):
        engine.generate_sync([1], params(stop_ids=(2, 300)))
    with pytest.raises(EngineError, match="allowed_ids has id -1"):
        engine.generate_sync([1], params(allowed_ids=(-1,)))
    with pytest.raises(EngineError, match=r"min_tokens=3 .* allowed_ids=\(2,\)"):
        engine.generate_sync([1], params(min_tokens=3, allowed_ids=(2,), stop_ids=(2,)))
    with pytest.raises(EngineError, match="n must be >= 1, got 0"):
        engine.generate_sync([1], params(), n=0)
    with pytest.raises(EngineError, match="2 prompts came with 1 params"):
        engine.generate_batch([[1], [2]], [params()])


# -- versions in a batch -----------------------------------------------------------------------------------


def test_versions_share_a_batch_and_stay_exact(
    engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    models = {0: model}
    for version in (1, 2):
        tensors = adapter_tensors(model, seed=version)
        engine.publish_sync(version, write_adapter(tmp_path / f"v{version}", tensors))
        models[version] = merged(model, tensors, scale=2.0)
    prompts = [p for p in prompts_of([3, 12, 12, 25]) for _ in range(3)]
    versions = [2, 0, 1] * 4

    async def ask() -> list:
        asked = (
            engine.generate(p, params(seed=i), version=v)
            for i, (p, v) in enumerate(zip(prompts, versions, strict=True))
        )
        return [answer[0] for answer in await asyncio.gather(*asked)]

    shapes = rows_per_forward(engine)
    mixed = asyncio.run(ask())
    assert sum(rows for rows, columns in shapes if columns > 1) == 12  # each (version, prompt) once
    assert len(shapes) < 12
    for i, c in enumerate(mixed):
        [alone] = engine.generate_sync(prompts[i], params(seed=i), version=versions[i])
        assert (c.version, c.ids) == (versions[i], alone.ids)
        np.testing.assert_allclose(c.logprobs, alone.logprobs, atol=1e-4)
        right = full_logprobs(models[c.version], prompts[i], c.ids)
        np.testing.assert_allclose(c.logprobs, right, atol=2e-4)
        wrong = full_logprobs(models[(c.version + 1) % 3], prompts[i], c.ids)
        assert np.abs(wrong - c.logprobs).mean() > 0.02


def test_peft_computes_the_same(engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    trained = get_peft_model(
        tiny_llama(), LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "down_proj"])
    )
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    trained.save_pretrained(tmp_path / "run-v1", save_embedding_layers=False)
    engine.publish_sync(1, tmp_path / "run-v1")
    scorer = PeftModel.from_pretrained(tiny_llama(), tmp_path / "run-v1").eval()
    prompts = prompts_of(LENGTHS)
    for prompt, c in zip(prompts, engine.generate_batch(prompts, params()), strict=True):
        assert c.version == 1
        np.testing.assert_allclose(c.logprobs, full_logprobs(scorer, prompt, c.ids), atol=2e-4)


# -- tensors shared with a learner -------------------------------------------------------------------------


def test_base_tensors_are_shared_not_copied() -> None:
    model = tiny_llama()
    base = model.state_dict()
    engine = HFEngine(base=base, config=model.config, tokenizer="bytes")
    assert engine._decoder is not None
    own = {p.data_ptr() for p in engine._decoder._model.parameters()}
    assert own == {t.data_ptr() for t in base.values()}
    modules = set(engine._decoder._model.modules())
    assert not modules & set(model.modules())
    assert all(p.requires_grad for p in model.parameters())  # the learner can go on training
    [prompt] = prompts_of([10])
    before = engine.generate_sync(prompt, params())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    [after] = engine.generate_sync(prompt, params())
    assert after != before[0]
    np.testing.assert_allclose(after.logprobs, full_logprobs(model, prompt, after.ids), atol=2e-4)


def test_building_an_engine_touches_neither_learner_nor_random_state() -> None:
    model = tiny_llama()
    state = torch.random.get_rng_state()
    engine = HFEngine(base=dict(model.named_parameters()), config=model.config, tokenizer="bytes")
    engine.generate_sync([1, 2], params())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.requires_grad for p in model.parameters())


def test_bfloat16_tensors_are_shared_as_they_are(tmp_path: Path) -> None:
    model = tiny_llama().to(torch.bfloat16)
    with pytest.raises(ConfigError, match="give dtype='bfloat16'"):
        HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes")
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes", dtype="bfloat16")
    engine.publish_sync(1, write_adapter(tmp_path / "v1", adapter_tensors(model)))
    [prompt] = prompts_of([10])
    base, adapted = (engine.generate_sync(prompt, params(), version=v)[0] for v in (0, 1))
    assert np.abs(full_logprobs(model, prompt, base.ids) - base.logprobs).mean() < 0.1
    assert adapted.logprobs != base.logprobs


# -- failures ----------------------------------------------------------------------------------------------


def test_a_failed_batch_fails_its_callers_and_no_more(engine: HFEngine) -> None:
    run = engine._batcher._run
    calls: list[int] = []

    def fails_once(requests: list) -> object:
        calls.append(len(requests))
        if len(calls) == 1:
            raise MemoryError("no room\nfor this")
        return run(requests)

    engine._batcher._run = fails_once  # type: ignore[assignment,method-assign]

    async def main() -> list:
        asked = (engine.generate([1, i], params()) for i in range(5))
        return await asyncio.gather(*asked, return_exceptions=True)

    failures = asyncio.run(main())
    assert [str(f) for f in failures] == ["the batch failed: MemoryError: no room"] * 5
    assert len({id(f) for f in failures}) == 5  # one exception each: tracebacks grow on shared ones
    assert isinstance(failures[0].__cause__, MemoryError)
    assert len(asyncio.run(main())) == 5 and calls == [5, 5]
    assert engine._versions._live[0].requests == 0


def test_broken_weights_are_an_error_not_a_sample() -> None:
    model = tiny_llama()
    base = {name: t.clone() for name, t in model.state_dict().items()}
    base["lm_head.weight"][5, 0] = float("nan")
    engine = HFEngine(base=base, config=model.config, tokenizer="bytes")
    with pytest.raises(EngineError, match="logits under version 0 are not finite"):
        engine.generate_sync([1, 2], params())


def test_cancelled_requests_leave_nothing_behind(engine: HFEngine, tmp_path: Path) -> None:
    model = tiny_llama()
    for version in (1, 2):
        engine.publish_sync(
            version, write_adapter(tmp_path / f"v{version}", adapter_tensors(model, seed=version))
        )
    started, go_on = threading.Event(), threading.Event()
    run = engine._batcher._run

    def held_up(requests: list) -> object:
        started.set()
        assert go_on.wait(60)
        return run(requests)

    engine._batcher._run = held_up  # type: ignore[assignment,method-assign]

    async def main() -> None:
        running = asyncio.create_task(engine.generate([1, 2], params(max_tokens=60), version=1))
        while not started.is_set():
            await asyncio.sleep(0)
        queued = asyncio.create_task(engine.generate([3, 4], params(), version=1))
        for _ in range(10):
            await asyncio.sleep(0)
        staged = asyncio.create_task(engine.generate([5, 6], params(), version=1))
        await asyncio.sleep(0)
        retired = asyncio.create_task(engine.retire(1))
        for task in (running, queued, staged):
            task.cancel()
        results = await asyncio.gather(running, queued, staged, return_exceptions=True)
        assert [type(r) for r in results] == [asyncio.CancelledError] * 3
        assert not retired.done()  # a cancelled request counts until the engine is done with it
        go_on.set()
        await retired
        assert engine.live_versions == (0, 2)
        assert len((await engine.generate([1], params()))[0].ids) == 6

    asyncio.run(main())


def test_a_closed_engine_refuses_everything(engine: HFEngine, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "v1", adapter_tensors(tiny_llama()))

    async def main() -> None:
        waiting = asyncio.create_task(engine.generate([1, 2], params()))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="engine is closed"):
            await waiting
        with pytest.raises(EngineError, match="engine is closed"):
            await engine.generate([1, 2], params())
        with pytest.raises(EngineError, match="engine is closed"):
            await engine.publish(1, adapter)
        with pytest.raises(EngineError, match="engine is closed"):
            async with engine.hold():
                pass

    asyncio.run(main())
    with pytest.raises(EngineError, match="engine is closed"):
        engine.generate_sync([1, 2], params())


def test_a_daemon_thread_s_batch_is_not_a_daemon(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter waits for a batch, whoever asked for it: torch must not be torn down under it."""
    seen: list[tuple[str, bool]] = []
    run = engine._batcher._run

    def watched(requests: list) -> object:
        seen.append((threading.current_thread().name, threading.current_thread().daemon))
        return run(requests)

    monkeypatch.setattr(engine._batcher, "_run", watched)
    asker = threading.Thread(target=lambda: engine.generate_sync([1, 2], params()), daemon=True)
    asker.start()
    asker.join()
    assert seen == [("engine-batches", False)]


def test_closing_ends_a_running_batch(engine: HFEngine) -> None:
    decoder = engine._decoder
    assert decoder is not None
    forward = decoder._forward
    forwards: list[bool] = []

    def slow(ids: torch.Tensor, *rest: object) -> torch.Tensor:
        """The second one lasts until the engine is told to close."""
        forwards.append(engine._batcher.stopping)
        while len(forwards) == 2 and not engine._batcher.stopping:
            time.sleep(0.001)
        return forward(ids, *rest)  # type: ignore[arg-type]

    decoder._forward = slow  # type: ignore[method-assign]

    async def main() -> None:
        task = asyncio.create_task(engine.generate([1, 2], params(max_tokens=90)))
        while len(forwards) < 2:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="closed while it sampled"):
            await task

    asyncio.run(main())
    assert forwards == [False, False], "no forward after the close"


# -- making one --------------------------------------------------------------------------------------------


def test_an_engine_from_a_folder_samples_as_one_from_tensors(
    engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "m")
    loaded = make_engine(f"hf:{tmp_path / 'm'}", tokenizer="bytes")
    assert isinstance(loaded, Engine) and isinstance(loaded, HFEngine)
    assert (loaded.model, loaded.max_context, loaded.tokenizer.rows) == (str(tmp_path / "m"), 96, 264)
    assert loaded.generate_sync([1, 2, 3], params()) == engine.generate_sync([1, 2, 3], params())
    same = make_engine("hf", model=tmp_path / "m", tokenizer="bytes", max_context=50)
    assert same.max_context == 50


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        ("vllm:not-a-url", {}, ConfigError, "an engine's URL is such as"),
        ("vllm", {}, ConfigError, "needs model="),
        ("sglang", {}, ConfigError, "is not started here"),
        ("openai:", {}, ConfigError, "needs a model"),
        ("hg:x", {}, ConfigError, "'hg:x' is unknown"),
        ("hf", {}, ConfigError, "needs a model"),
        ("scripted", {}, ConfigError, "give one"),
        ("hf:a", {"model": "b"}, ConfigError, "two models"),
        ("hf:./no/such/folder", {}, MissingData, "no config.json there"),
    ],
)
def test_unusable_specs_are_one_line(spec: str, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        make_engine(spec, **options)
    assert "\n" not in str(caught.value)


def test_arguments_are_checked(model: LlamaForCausalLM) -> None:
    base, config = model.state_dict(), model.config
    small = {name: t for name, t in base.items() if "layers.1" not in name}
    for options, message in [
        ({}, "one of model= .* and base="),
        ({"base": base, "tokenizer": "bytes"}, "needs config="),
        ({"base": base, "config": config}, "needs tokenizer="),
        ({"base": base, "config": config, "tokenizer": "bytes", "dtype": "fp8"}, "dtype must be one of"),
        ({"base": base, "config": config, "tokenizer": "bytes", "max_batch": 0}, "max_batch must be >= 1"),
        ({"base": base, "config": config, "tokenizer": "bytes", "max_context": 97}, "max_context must be"),
        ({"base": small, "config": config, "tokenizer": "bytes"}, "lacks model.layers.1"),
        ({"base": {**base, "x": base["lm_head.weight"]}, "config": config, "tokenizer": "bytes"}, "has x"),
        ({"base": base, "config": tiny_llama(hidden_size=64).config, "tokenizer": "bytes"}, "does not fit"),
        ({"base": base, "config": config, "tokenizer": "bytes", "max_live_versions": 0}, "max_live_versions"),
    ]:
        with pytest.raises(ConfigError, match=message):
            HFEngine(**options)  # type: ignore[arg-type]


def test_importing_engines_loads_no_torch() -> None:
    code = (
        "import sys, atropos_gym.engines; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
