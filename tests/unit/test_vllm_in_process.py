"""vLLM in this process, against a stand-in for its modules: what it is told, what is refused."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

from atropos_gym.engines import VLLMInProcess, make_engine
from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.errors import (
    AnswerRefused,
    ConfigError,
    ContextFull,
    EngineError,
    MissingData,
    VersionExpired,
)
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8, seed=7)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


class EngineDeadError(Exception):
    """As vLLM's."""


class FakeAsyncLLM:
    """AsyncLLM as it was seen to behave: outputs in the shapes of vllm 0.32, adapters by integer id."""

    made: list[FakeAsyncLLM] = []
    mangle: Callable[[Any], Any] = staticmethod(lambda output: output)
    error: Exception | None = None

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        self.model_config = SimpleNamespace(max_model_len=getattr(arguments, "max_model_len", 100))
        self.adapters: dict[int, Any] = {}
        self.added: list[Any] = []
        self.asked: list[SimpleNamespace] = []
        self.running = 0
        self.gate: asyncio.Event | None = None
        self.down = 0

    @classmethod
    def from_engine_args(cls, arguments: SimpleNamespace) -> FakeAsyncLLM:
        cls.made.append(cls(arguments))
        return cls.made[-1]

    async def generate(
        self, prompt: dict[str, list[int]], params: SimpleNamespace, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        if self.error is not None:
            raise self.error
        if lora_request is not None and lora_request.lora_int_id not in self.adapters:
            raise EngineDeadError("an adapter that was never added")
        self.asked.append(SimpleNamespace(params=params, request_id=request_id, lora=lora_request))
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            number = lora_request.lora_int_id if lora_request else 0
            samples = [self._sample(prompt["prompt_token_ids"], params, i, number) for i in range(params.n)]
            yield type(self).mangle(
                SimpleNamespace(
                    request_id=request_id,
                    prompt_token_ids=prompt["prompt_token_ids"],
                    outputs=samples,
                    finished=True,
                    num_cached_tokens=2,
                )
            )
        finally:
            self.running -= 1

    @staticmethod
    def _sample(prompt: list[int], params: SimpleNamespace, index: int, adapter: int) -> SimpleNamespace:
        rng = random.Random(f"{prompt}{params.seed + index}{adapter}")
        ids, logprobs = [], []
        grammar = getattr(params, "structured_outputs", None)
        body = rng.choice(grammar.grammar.removeprefix("root ::= ").split(" | ")) if grammar else ""
        masked = [*map(int, re.findall(r"\d+", body)), *params.stop_token_ids] if grammar else []
        for k in range(params.max_tokens):
            ids.append(masked[k] if masked else rng.randrange(256))
            logprobs.append({ids[-1]: SimpleNamespace(logprob=-rng.random(), rank=1, decoded_token=None)})
            if ids[-1] in params.stop_token_ids:
                return SimpleNamespace(
                    index=index, token_ids=ids, logprobs=logprobs, finish_reason="stop", stop_reason=ids[-1]
                )
        return SimpleNamespace(
            index=index, token_ids=ids, logprobs=logprobs, finish_reason="length", stop_reason=None
        )

    async def add_lora(self, request: Any) -> bool:
        if request.lora_path.endswith("unliked"):
            raise ValueError("LoRA rank 32 is greater than max_lora_rank 16.")
        self.adapters[request.lora_int_id] = request
        self.added.append(request)
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.adapters.pop(number, None) is not None

    def shutdown(self) -> None:
        self.down += 1


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeAsyncLLM]:
    """Puts the stand-in where vLLM's modules would be."""
    cls = type("FreshAsyncLLM", (FakeAsyncLLM,), {"made": []})
    for module in (
        _module("vllm", SamplingParams=SimpleNamespace),
        _module("vllm.engine"),
        _module("vllm.engine.arg_utils", AsyncEngineArgs=SimpleNamespace),
        _module("vllm.v1"),
        _module("vllm.v1.engine"),
        _module("vllm.v1.engine.async_llm", AsyncLLM=cls),
        _module("vllm.v1.engine.exceptions", EngineDeadError=EngineDeadError),
        _module(
            "vllm.sampling_params",
            RequestOutputKind=SimpleNamespace(FINAL_ONLY=2),
            StructuredOutputsParams=lambda grammar: SimpleNamespace(grammar=grammar),
        ),
        _module("vllm.lora"),
        _module(
            "vllm.lora.request",
            LoRARequest=lambda name, number, path: SimpleNamespace(
                lora_name=name, lora_int_id=number, lora_path=path
            ),
        ),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return cls


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[VLLMInProcess]:
    options = {"tokenizer": "bytes", "run": "r0", "retry_pause": 0.0, "cancel_grace": 0.0, **options}
    engine = VLLMInProcess(folder, **options)
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model, root = tiny_llama(), tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(root / name, adapter_tensors(model, seed=k))
        for k, name in enumerate(("v1", "v2", "unliked"))
    ]


def test_choices_are_a_grammar_of_ids(llm: type[FakeAsyncLLM], tmp_path: Path) -> None:
    choices = ((1, 2, 258), (1, 258), (3, 258))
    with opened(tmp_path) as engine:
        asked = PARAMS.with_(choices=choices, stop_ids=(258,))
        samples = run(engine.generate(PROMPT, asked, 12))
        assert {sample.ids for sample in samples} <= set(choices)
        assert {sample.trainable for sample in samples} == {"choices"}
        run(engine.generate(PROMPT, PARAMS))
    sent, free = (one.params for one in llm.made[0].asked)
    assert sent.structured_outputs.grammar == "root ::= Token(1) Token(2) | Token(1) | Token(3)"
    assert sent.allowed_token_ids == [1, 2, 3, 258]
    assert not hasattr(free, "structured_outputs")


def test_ids_and_logprobs_come_back(llm: type[FakeAsyncLLM], tmp_path: Path) -> None:
    with opened(tmp_path, dtype="float32", rank=4, engine_args={"enforce_eager": True}) as engine:
        assert isinstance(engine, Engine) and engine.model == str(tmp_path) and engine.max_context == 100
        first, second = run(engine.generate(PROMPT, PARAMS, 2))
        assert first.ids != second.ids and len(first.ids) == len(first.logprobs or ()) == 8
        assert first.trainable is True and run(engine.generate(PROMPT, PARAMS, 2)) == [first, second]
        [stopped] = run(engine.generate(PROMPT, PARAMS.with_(stop_ids=(first.ids[2],))))
        assert (stopped.ids, stopped.finish_reason) == (first.ids[:3], "stop")
        greedy = run(engine.generate(PROMPT, PARAMS.with_(temperature=0.0), 2))
        assert [one.logprobs for one in greedy] == [None, None]
        assert engine.metrics()["cached_tokens"] == 8
        with pytest.raises(ContextFull):
            run(engine.generate([1] * 100, PARAMS))
        run(engine.generate(PROMPT, PARAMS.with_(allowed_ids=tuple(range(256)), top_k=5)))
    [made] = llm.made
    assert made.down == 1, "ended once"
    assert vars(made.arguments) == {
        "model": str(tmp_path),
        "dtype": "float32",
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 5,
        "max_lora_rank": 8,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enforce_eager": True,
    }
    sent = made.asked[0].params
    assert (sent.n, sent.seed, sent.logprobs, sent.detokenize, sent.ignore_eos) == (2, 7, 0, False, True)
    assert (sent.top_k, made.asked[-1].params.top_k, sent.output_kind) == (0, 5, 2)
    assert made.asked[-1].params.allowed_token_ids == list(range(256))
    assert len({asked.request_id for asked in made.asked}) == len(made.asked)


def test_versions_are_added_before_they_are_named_and_removed_after(
    llm: type[FakeAsyncLLM], tmp_path: Path, folders: list[Path]
) -> None:
    async def main() -> None:
        with opened(tmp_path) as engine:
            await engine.publish(1, folders[0])
            async with engine.hold() as held:
                await engine.publish(2, folders[1])
                retiring = asyncio.create_task(engine.retire(1))
                [old] = await engine.generate(PROMPT, PARAMS, version=held.version)
                [new] = await engine.generate(PROMPT, PARAMS)
                assert (old.version, new.version) == (1, 2) and old.ids != new.ids
                assert len(llm.made[0].adapters) == 2
            await retiring
            assert [one.lora_name for one in llm.made[0].adapters.values()] == ["r0-v2"]
            with pytest.raises(VersionExpired):
                await engine.generate(PROMPT, PARAMS, version=1)
            with pytest.raises(EngineError, match="make the engine with a higher rank="):
                await engine.publish(3, folders[2])
            assert engine.newest == 2 and (await engine.generate(PROMPT, PARAMS))[0] == new
            async with engine.trial(folders[0].rename(folders[0].with_name("t1"))) as held:
                assert (await engine.generate(PROMPT, PARAMS, version=held.version))[0].version < 0

    run(main())
    numbers = [one.lora_int_id for one in llm.made[0].added]
    assert len(numbers) == len(set(numbers)) == 3 and min(numbers) >= 1
    assert not llm.made[0].adapters


def test_an_adapter_that_vllm_does_not_remove_is_one_line(
    llm: type[FakeAsyncLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def remove_lora(self: FakeAsyncLLM, number: int) -> bool:
        raise RuntimeError("a bug")

    with opened(tmp_path) as engine:
        for version in (1, 2):
            tensors = adapter_tensors(tiny_llama(), seed=version)
            run(engine.publish(version, write_adapter(tmp_path / f"v{version}", tensors)))
        monkeypatch.setattr(llm, "remove_lora", remove_lora)
        with pytest.raises(EngineError, match="did not remove adapter r0-v1: a bug"):
            run(engine.retire(1))
    assert llm.made[0].down == 1, "vLLM is ended all the same"


def test_a_cancelled_request_ends_the_generation(llm: type[FakeAsyncLLM], tmp_path: Path) -> None:
    async def main() -> None:
        with opened(tmp_path) as engine:
            llm.made[0].gate = asyncio.Event()
            task = asyncio.create_task(engine.generate(PROMPT, PARAMS))
            await until(lambda: llm.made[0].running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: llm.made[0].running == 0)

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not true():
                await asyncio.sleep(0.001)

    run(main())


def _shortened(output: Any) -> Any:
    output.outputs[0].logprobs.pop()
    return output


def _unsampled(output: Any) -> Any:
    output.outputs[0].logprobs[1] = {300: SimpleNamespace(logprob=-1.0)}
    return output


def _set(**changes: Any) -> Callable[[Any], Any]:
    def mangle(output: Any) -> Any:
        for sample in output.outputs:
            vars(sample).update(changes)
        return output

    return mangle


def _prompt(output: Any) -> Any:
    output.prompt_token_ids = [0, *output.prompt_token_ids]
    return output


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (_shortened, "8 token_ids and 7 token_logprobs"),
        (_unsampled, "no finite logprob at position 1"),
        (_set(logprobs=None), "has no logprobs"),
        (_set(index=0), "samples cannot be told apart"),
        (_set(finish_reason=None), "finish_reason None"),
        (_prompt, "engine changed the prompt"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_refused(
    llm: type[FakeAsyncLLM], tmp_path: Path, mangle: Any, message: str
) -> None:
    llm.mangle = staticmethod(mangle)
    with opened(tmp_path) as engine, pytest.raises(AnswerRefused, match=message):
        run(engine.generate(PROMPT, PARAMS, 2))


def test_samples_in_another_order_are_matched_by_index(llm: type[FakeAsyncLLM], tmp_path: Path) -> None:
    def reverse(output: Any) -> Any:
        output.outputs.reverse()
        return output

    with opened(tmp_path) as engine:
        ordered = run(engine.generate(PROMPT, PARAMS, 3))
        llm.mangle = staticmethod(reverse)
        assert run(engine.generate(PROMPT, PARAMS, 3)) == ordered


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EngineDeadError("core"), "died: core; make the engine anew"),
        (ValueError("no"), "refused .* 400 no"),
        (RuntimeError("a bug"), "failed: RuntimeError: a bug"),
    ],
)
def test_what_vllm_raises_is_one_line(
    llm: type[FakeAsyncLLM], tmp_path: Path, error: Exception, message: str
) -> None:
    llm.error = error
    with opened(tmp_path) as engine, pytest.raises(EngineError, match=message):
        run(engine.generate(PROMPT, PARAMS))


def test_specs(llm: type[FakeAsyncLLM], tmp_path: Path) -> None:
    for spec, model in (
        (f"vllm-inprocess:{tmp_path}", None),
        ("vllm-inprocess", tmp_path),
        ({"kind": "vllm", "in_process": True, "path": str(tmp_path)}, None),
    ):
        engine = make_engine(spec, model=model, tokenizer="bytes", max_context=50)
        assert isinstance(engine, VLLMInProcess) and engine.max_context == 50
        engine.shutdown()
    for spec, error, message in (
        ("vllm-inprocess", ConfigError, "needs a model"),
        (f"vllm-inprocess:{tmp_path / 'nothing'}", MissingData, "no model folder"),
    ):
        with pytest.raises(error, match=message):
            make_engine(spec)


def test_without_vllm_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.engine", "vllm.engine.arg_utils"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingData, match="pip install vllm, or run it apart") as caught:
        VLLMInProcess(tmp_path, tokenizer="bytes")
    assert "\n" not in str(caught.value)
