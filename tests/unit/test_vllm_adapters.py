"""Adapters on a vLLM server: loading, refusals that name the remedy, retiring, restarts (d1-d4, d18-d21)."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from atropos_gym.engines._remote import Answer
from atropos_gym.engines._vllm_adapters import check_adapter, load_refusal, model_shapes
from atropos_gym.engines.base import SamplingParams
from atropos_gym.engines.vllm import VLLMEngine
from atropos_gym.errors import EngineError, EngineUnreachable, VersionExpired
from tests.tools.fake_vllm import Adapter as Loaded
from tests.tools.fake_vllm import FakeVLLM, weights_of
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter

PROMPT = list(range(84))
PARAMS = SamplingParams(max_tokens=8, seed=7)
T = TypeVar("T")
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Adapter = Callable[..., Path]


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_llama()


@pytest.fixture
def adapter(tmp_path: Path, model: torch.nn.Module) -> Adapter:
    """Returns a function that writes adapter number ``version``."""

    def write(version: int = 1, *, rank: int = 4, **config: Any) -> Path:
        tensors = adapter_tensors(model, rank=rank, seed=version)
        return write_adapter(tmp_path / f"v{version}", tensors, rank=rank, **config)

    return write


async def sample(engine: VLLMEngine, version: int | None = None) -> tuple[float, ...]:
    [completion] = await engine.generate(PROMPT, PARAMS, version=version)
    assert completion.logprobs is not None
    return completion.logprobs


def said(message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": 0}})


# -- refusals ----------------------------------------------------------------------------------------------


def test_a_version_is_a_name_and_a_folder(adapter: Adapter, tmp_path: Path) -> None:
    fake = FakeVLLM()
    with fake.engine(run="r7") as engine:
        base = run(sample(engine))
        run(engine.publish(1, adapter(1)))
        assert fake.adapters["r7-v1"].root == str(tmp_path / "v1")
        assert run(sample(engine)) != base and run(sample(engine, 0)) == base
        assert engine.newest == 1 and fake.asked()[-2]["model"] == "r7-v1"
        [body] = fake.asked("/v1/load_lora_adapter")
        assert body.keys() == {"lora_name", "lora_path"}, "load_inplace is never sent: it would stick"


def test_d1_no_route_for_adapters(adapter: Adapter) -> None:
    fake = FakeVLLM(runtime_lora=False)
    with fake.engine() as engine:
        with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            run(engine.publish(1, adapter()))
        assert len(fake.asked("/v1/load_lora_adapter")) == 1, "not tried again"
        assert engine.newest == 0 and run(sample(engine))


def test_d1_lora_is_not_enabled(adapter: Adapter) -> None:
    fake = FakeVLLM(lora=False)
    with fake.engine() as engine, pytest.raises(EngineError, match="start vLLM with --enable-lora"):
        run(engine.publish(1, adapter()))
    assert len(fake.asked("/v1/load_lora_adapter")) == 1, "not tried again although it is a 500"


def test_d2_a_folder_that_the_server_cannot_see(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is made absolute, and the server's view is a folder that does not exist there."""
    folder = adapter()
    fake = FakeVLLM()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(fake, "_load", hidden(fake))
    with fake.engine() as engine, pytest.raises(EngineError, match="cannot see.*adapter_dir") as caught:
        run(engine.publish(1, Path(folder.name)))
    assert str(folder) in str(caught.value) and "VLLM_ALLOW" not in str(caught.value)
    [body] = fake.asked("/v1/load_lora_adapter")
    assert body["lora_path"] == str(folder)


def hidden(fake: FakeVLLM) -> Callable[[dict[str, Any]], Any]:
    original = fake._load

    async def load(body: dict[str, Any]) -> Any:
        return await original(body | {"lora_path": "/nowhere" + body["lora_path"]})

    return load


def test_d2_adapter_dir_is_a_folder_that_both_see(adapter: Adapter, tmp_path: Path) -> None:
    fake, shared = FakeVLLM(), tmp_path / "shared"
    with fake.engine(adapter_dir=shared, max_live_versions=1) as engine:
        folder = adapter(1)
        run(engine.publish(1, folder))
        copy = Path(fake.adapters["r0-v1"].root)
        assert copy.parent == shared and copy.name.startswith("r0-v1-")
        assert (copy / "adapter_config.json").read_bytes() == (folder / "adapter_config.json").read_bytes()
        run(engine.publish(2, adapter(2)))
        [two] = shared.iterdir()
        assert two.name.startswith("r0-v2-"), "a copy goes with its version"
        inside = write_adapter(shared / "v3", adapter_tensors(tiny_llama(), seed=3))
        run(engine.publish(3, inside))
        assert fake.adapters["r0-v3"].root == str(inside), "what lies there already is not copied"
    assert [child.name for child in shared.iterdir()] == ["v3"], "only copies are deleted"
    assert folder.is_dir()


def test_d3_a_rank_above_the_limit(adapter: Adapter) -> None:
    fake = FakeVLLM(max_lora_rank=16)
    with fake.engine() as engine, pytest.raises(EngineError, match="--max-lora-rank 32.* r=16"):
        run(engine.publish(1, adapter(rank=32)))
    assert len(fake.asked("/v1/load_lora_adapter")) == 1, "not tried again although it is a 500"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
    ],
)
def test_d4_settings_that_vllm_lacks_are_found_before_the_load(
    adapter: Adapter, field: str, value: Any
) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine, pytest.raises(EngineError, match=f"sets {field}=.*change {field}"):
        run(engine.publish(1, adapter(**{field: value})))
    assert fake.asked("/v1/load_lora_adapter") == []


@pytest.mark.parametrize(
    ("sentence", "field"),
    [
        ("vLLM does not yet support DoRA.", "use_dora"),
        ("Adapter bias is not supported.", "bias"),
        ("vLLM only supports modules_to_save being None.", "modules_to_save"),
    ],
)
def test_d4_the_servers_sentence_is_shown(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch, sentence: str, field: str
) -> None:
    fake = FakeVLLM()
    monkeypatch.setattr(fake, "_unservable", lambda folder: sentence)
    with fake.engine() as engine, pytest.raises(EngineError, match=f"with {field}") as caught:
        run(engine.publish(1, adapter()))
    assert sentence in str(caught.value)


FAILED = "Loading lora r0-v3 failed: "
REFUSALS = [
    ("d1-detail", 404, '{"detail": "Not Found"}', "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ("d1-text", 404, "Not Found", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ("d1-wrapped", 404, said("Not Found"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ("d1-method", 405, '{"detail": "Method Not Allowed"}', "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ("d1-flag", 500, said("LoRA is not enabled. Use --enable-lora to enable LoRA."), "--enable-lora"),
    ("d2", 404, said(f"{FAILED}No adapter found for /x/r0-v3"), "/x/r0-v3 .*adapter_dir"),
    ("d3", 500, said("LoRA rank 32 is greater than max_lora_rank 16."), "--max-lora-rank 32, or .* r=16"),
    ("d3-odd", 500, said("LoRA rank 20 is greater than max_lora_rank 16."), "rank 20 .*--max-lora-rank 32"),
    ("d4-dora", 500, said("vLLM does not yet support DoRA."), "change use_dora"),
    ("d4-bias", 500, said("Adapter bias is not supported."), "change bias"),
    ("d4-save", 500, said("vLLM only supports modules_to_save being None."), "change modules_to_save"),
    ("targets", 500, said("expected target modules in {'qkv_proj'} but received ['q']"), "target_modules"),
    ("cut", 500, said("Error while deserializing header: incomplete metadata"), "is not whole"),
    ("base", 400, said("The lora adapter 'm' conflicts with a served base model."), "another run="),
    ("key", 401, '{"error": "Unauthorized"}', "api_key="),
    ("other", 400, said("validation error"), "refused adapter r0-v3 from /x/r0-v3: 400 validation error"),
    ("proxy", 502, "<html>Bad Gateway</html>", "502 <html>Bad Gateway"),
]


@pytest.mark.parametrize(
    ("status", "body", "message"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_a_refused_load_says_what_to_change(status: int, body: str, message: str) -> None:
    line = load_refusal(Answer(status, body.encode()), "r0-v3", Path("/x/r0-v3"), "http://fake")
    assert re.search(message, line) and "\n" not in line
    if not message.startswith("VLLM"):
        assert "VLLM_ALLOW" not in line, "the two 404 are told apart"


# -- the folder --------------------------------------------------------------------------------------------


def change(folder: Path, key: str, tensor: torch.Tensor | None) -> Path:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(key, None)
    if tensor is not None:
        tensors[key] = tensor
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        (f"{Q}.lora_A.weight", torch.zeros(8, 32), "shape .8, 32., which is not of rank r=4"),
        (f"{Q}.lora_B.weight", torch.zeros(32, 8), "shape .32, 8., which is not of rank r=4"),
        (f"{Q}.lora_A.weight", torch.zeros(4, 100), "32 x 100 .*the served model's has 32 x 32"),
        (f"{Q}.lora_B.weight", torch.zeros(100, 4), "100 x 32 .*the served model's has 32 x 32"),
        (f"{Q}.lora_B.weight", None, "q_proj has no lora_B"),
        ("base_model.model.model.layers.9.query.lora_A.weight", torch.zeros(4, 32), "query has no lora_B"),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            torch.zeros(4, 264),
            "is no lora_A or lora_B",
        ),
    ],
)
def test_d21_shapes_that_a_server_would_take(
    adapter: Adapter, model: Any, tmp_path: Path, key: str, tensor: torch.Tensor | None, message: str
) -> None:
    model.save_pretrained(tmp_path / "model")
    shapes = model_shapes(tmp_path / "model")
    folder = adapter()
    assert check_adapter(folder, shapes) == 4
    with pytest.raises(EngineError, match=message):
        check_adapter(change(folder, key, tensor), shapes)


def test_d21_every_target_has_tensors(adapter: Adapter, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    shapes = model_shapes(tmp_path / "model")
    folder = change(change(adapter(), f"{Q}.lora_A.weight", None), f"{Q}.lora_B.weight", None)
    assert check_adapter(folder) == 4, "layer 1 still has it"
    with pytest.raises(EngineError, match="targets model.layers.0.self_attn.q_proj but has no tensors"):
        check_adapter(folder, shapes)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["query"]}))
    with pytest.raises(EngineError, match="targets query but has no tensors"):
        check_adapter(folder)


def test_an_adapter_of_some_layers_is_whole(adapter: Adapter, model: Any, tmp_path: Path) -> None:
    """peft leaves layers out on purpose where `layers_to_transform` says so."""
    model.save_pretrained(tmp_path / "model")
    folder = adapter(layers_to_transform=[1])
    for key in [f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"]:
        change(folder, key, None)
    assert check_adapter(folder, model_shapes(tmp_path / "model")) == 4


@pytest.mark.parametrize("keep", [0, 4, 100, -7])
def test_a_cut_file_is_found_before_the_load(adapter: Adapter, keep: int) -> None:
    folder = adapter()
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(EngineError, match="no safetensors file|was it complete"):
        check_adapter(folder)


def test_a_folder_that_lacks_a_file(adapter: Adapter) -> None:
    folder = adapter()
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError, match="adapter_model.safetensors cannot be read"):
        check_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(EngineError, match="is not JSON"):
        check_adapter(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(EngineError, match=r"has no adapter_config.json"):
        check_adapter(folder)


# -- versions ----------------------------------------------------------------------------------------------


def test_d18_a_name_or_folder_is_never_used_twice(adapter: Adapter) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        folder = adapter(1)
        run(engine.publish(3, folder))
        run(engine.publish(3, folder))  # the same again is no work
        with pytest.raises(EngineError, match=r"holds version 3 already; write 4 to a new folder"):
            run(engine.publish(4, folder))
        with pytest.raises(EngineError, match="version 3 was published from"):
            run(engine.publish(3, adapter(2)))
        assert len(fake.asked("/v1/load_lora_adapter")) == 1


def test_d18_the_fake_shows_what_a_reused_pair_would_do(adapter: Adapter) -> None:
    """Old numbers with cached_tokens 64 and status 200: nothing in the answer tells."""
    import shutil

    fake = FakeVLLM()
    old, new = adapter(1), adapter(2)

    async def logprobs(name: str) -> tuple[Any, int]:
        status, answer = await fake._complete(
            {
                "model": name,
                "prompt": PROMPT,
                "seed": 1,
                "max_tokens": 2,
                "logprobs": 0,
                "return_token_ids": True,
            }
        )
        assert status == 200
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["logprobs"]["token_logprobs"], cached

    async def main() -> None:
        await fake._load({"lora_name": "x", "lora_path": str(old)})
        before, cached = await logprobs("x")
        assert cached == 0
        shutil.copy(new / "adapter_model.safetensors", old / "adapter_model.safetensors")
        fake._unload({"lora_name": "x"})
        await fake._load({"lora_name": "x", "lora_path": str(old)})
        assert await logprobs("x") == (before, 64)
        await fake._load({"lora_name": "y", "lora_path": str(new)})
        after, cached = await logprobs("y")
        assert after != before and cached == 0

    run(main())


def test_d19_load_switch_drain_unload_then_the_folder_may_go(adapter: Adapter) -> None:
    fake = FakeVLLM()
    events: list[str] = []

    async def main(engine: VLLMEngine) -> None:
        two, three = adapter(2), adapter(3)
        await engine.publish(2, two)
        fake.inject("slow", times=3)
        async with engine.hold() as held:
            running = [
                asyncio.ensure_future(engine.generate([1, 2, i], PARAMS, version=held.version))
                for i in range(3)
            ]
            while len(fake.asked()) < 3:
                await asyncio.sleep(0.001)
            publishing = asyncio.ensure_future(engine.publish(3, three))
            while engine.newest == 2:
                await asyncio.sleep(0.001)
            assert (await engine.generate(PROMPT, PARAMS))[0].version == 3, (
                "new requests run under it at once"
            )
            assert "r0-v2" in fake.adapters and not publishing.done()
            engine._thread.loop.call_soon_threadsafe(fake.gate.set)
            versions = {completion.version for [completion] in await asyncio.gather(*running)}
            assert versions == {2}
            assert "r0-v2" in fake.adapters and not publishing.done(), "the episode still holds it"
        await publishing
        assert "r0-v2" not in fake.adapters and not fake.down
        events.extend(path.rsplit("/", 1)[-1] for path, _ in fake.requests)
        with pytest.raises(VersionExpired, match="version 2 is no longer served"):
            await engine.generate(PROMPT, PARAMS, version=2)
        for file in two.iterdir():
            file.unlink()
        two.rmdir()
        await engine.generate(PROMPT, PARAMS)
        assert not fake.down, "nothing names a folder that is gone"

    with fake.engine(max_live_versions=1) as engine:
        run(main(engine))
    swap = [event for event in events if event != "models"]
    assert swap == [
        "load_lora_adapter",
        *["completions"] * 3,
        "load_lora_adapter",
        "completions",
        "unload_lora_adapter",
    ]


def test_d19_a_cancelled_request_counts_until_the_server_is_done_with_it(adapter: Adapter) -> None:
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        await engine.publish(1, adapter(1))
        await engine.publish(2, adapter(2))
        fake.inject("no answer")
        asked = asyncio.ensure_future(engine.generate(PROMPT, PARAMS, version=1))
        while not fake.asked():
            await asyncio.sleep(0.001)
        cancelled = time.monotonic()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await engine.retire(1)
        assert time.monotonic() - cancelled >= 0.25, "it was on its way to the server"
        assert "r0-v1" not in fake.adapters

    with fake.engine(cancel_grace=0.25) as engine:
        run(main(engine))


def test_d19_a_late_request_is_asked_again_under_the_newest(adapter: Adapter) -> None:
    """Somebody else unloaded it: 404, and the sample is not tried again under the old version."""
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        await engine.publish(1, adapter(1))
        fake.inject("500")  # the first try: between it and the next one the world changes
        original = fake._before

        async def swap(fault: str, send: Any) -> Any:
            del fake.adapters["r0-v1"]
            for replica in engine._router.replicas:
                replica.adapters.pop("r0-v1")
            publishing.append(asyncio.run_coroutine_threadsafe(engine.publish(2, two), loop))
            while engine.newest == 1:
                await asyncio.sleep(0.001)
            return await original(fault, send)

        publishing: list[Any] = []
        two, loop = adapter(2), asyncio.get_running_loop()
        fake._before = swap  # type: ignore[method-assign]
        [completion] = await engine.generate(PROMPT, PARAMS)
        assert completion.version == 2
        await asyncio.wrap_future(publishing[0])

    with fake.engine() as engine:
        run(main(engine))
    assert [body["model"] for body in fake.asked()] == ["r0-v1", "r0-v1", "r0-v2"]


def test_d20_a_restarted_server_gets_its_versions_again(adapter: Adapter) -> None:
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        await engine.publish(1, adapter(1))
        await engine.publish(2, adapter(2))
        before = {version: await sample(engine, version) for version in (1, 2)}
        fake.restart()
        fake.requests.clear()
        answers = await asyncio.gather(*(sample(engine, 1 + i % 2) for i in range(40)))
        assert answers == [before[1 + i % 2] for i in range(40)]
        loads = [body["lora_name"] for body in fake.asked("/v1/load_lora_adapter")]
        assert sorted(loads) == ["r0-v1", "r0-v2"], "once, however many failed together"
        assert {body["model"] for body in fake.asked()} == {"r0-v1", "r0-v2"}, "the base never stands in"
        assert engine.counters["restored"] == 2

    with fake.engine() as engine:
        run(main(engine))


def test_d20_a_lost_answer_to_a_load(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 already loaded: right only from this very folder."""
    fake = FakeVLLM()
    original = fake._load
    lost = [True]

    async def load(body: dict[str, Any]) -> Any:
        reply = await original(body)
        if lost:
            lost.pop()
            return 503, "the proxy lost it"
        return reply

    monkeypatch.setattr(fake, "_load", load)
    with fake.engine() as engine:
        run(engine.publish(1, adapter(1)))
        assert engine.newest == 1
        assert [path for path, _ in fake.requests].count("/v1/load_lora_adapter") == 2
        fake.adapters["r0-v2"] = fake.adapters["r0-v1"]  # left by somebody else, from another folder
        with pytest.raises(EngineError, match="has an adapter r0-v2 from .*v1 already.*give another run="):
            run(engine.publish(2, adapter(2)))


def test_d20_another_server_in_its_place_is_refused(adapter: Adapter) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        run(engine.publish(1, adapter(1)))
        fake.restart()
        fake.max_model_len = 512
        with pytest.raises(EngineError, match="restarted as another server.*max_model_len 512"):
            run(sample(engine))
        assert engine.counters["lost/EngineError"] == 1


def test_d20_the_probe_of_the_start_is_repeated(adapter: Adapter) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        run(engine.check())
        run(engine.publish(1, adapter(1)))
        first = run(sample(engine))
        fake.restart()
        assert run(sample(engine)) == first
        fake.restart()
        fake.processed = False
        with pytest.raises(EngineError, match="restarted with other settings"):
            run(sample(engine))


Change = Callable[[FakeVLLM], None]


def raw(fake: FakeVLLM) -> None:
    fake.processed = False


def another(fake: FakeVLLM) -> None:
    """A model so different that it draws other ids under the same seeds."""
    fake.script = lambda prompt, seed, request: [seed % 3] * request["max_tokens"]


@pytest.mark.parametrize("change", [raw, another])
@pytest.mark.parametrize("version", [0, 1])
def test_d20_a_server_that_is_another_one_now_is_refused(
    adapter: Adapter, change: Change, version: int
) -> None:
    """With adapters, which it has forgotten, and without any, where only connections tell of the restart."""
    fake = FakeVLLM(script=lambda prompt, seed, request: [100 + seed % 3] * request["max_tokens"])
    with fake.engine() as engine:
        run(engine.check())
        if version:
            run(engine.publish(version, adapter(version)))
        fake.restart()
        fake.inject("reset")
        assert len(run(sample(engine))) == 8, "it is the same"
        right = fake.script
        fake.restart()
        fake.inject("reset")
        change(fake)
        for _ in range(2):
            with pytest.raises(EngineError, match="was restarted (with other settings|as another server)"):
                run(sample(engine))
        fake.restart()
        fake.processed, fake.script = True, right
        assert len(run(sample(engine))) == 8, "started as it was, it is taken again"


def test_d20_a_broken_connection_is_followed_by_one_probe() -> None:
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        await engine.check()
        fake.inject("reset", times=5)
        fake.requests.clear()
        await asyncio.gather(*(sample(engine) for _ in range(20)))
        await asyncio.gather(*(sample(engine) for _ in range(20)))

    with fake.engine() as engine:
        run(main(engine))
    assert len([body for body in fake.asked() if body["n"] == 16]) == 1


def test_a_trial_is_no_version(adapter: Adapter) -> None:
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        base = await sample(engine)
        async with engine.trial(adapter(1)) as held:
            assert held.version < 0 and engine.newest == 0
            assert await sample(engine, held.version) != base and await sample(engine) == base
            [name] = fake.adapters
            assert name.startswith("r0-trial-")
        assert fake.adapters == {}

    with fake.engine() as engine:
        run(main(engine))


def killed(fake: FakeVLLM, folder: Path, **options: Any) -> None:
    """Publishes version 1 as a process that never comes to its close."""
    with fake.engine(**options) as engine:
        run(engine.publish(1, write_adapter(folder, adapter_tensors(tiny_llama(), seed=1))))
        left = dict(fake.adapters)
    fake.adapters.update(left)
    shutil.rmtree(folder)


def test_what_an_earlier_life_left_loaded_is_never_served(tmp_path: Path) -> None:
    """The next run of a script writes other weights into the same folder, and they are version 1 now."""
    fake = FakeVLLM()
    killed(fake, tmp_path / "v1", run=None)
    with fake.engine(run=None) as engine:
        run(engine.publish(1, write_adapter(tmp_path / "v1", adapter_tensors(tiny_llama(), seed=2))))
        run(sample(engine))
        served = fake.adapters[fake.asked()[-1]["model"]]
        assert served.weights == weights_of(tmp_path / "v1")


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_whose_name_was_used_before_serves_its_own_weights(tmp_path: Path, shared: bool) -> None:
    """The name is taken: a version gets another one, also where its folder is that of the last time."""
    fake, options = FakeVLLM(), {"adapter_dir": tmp_path / "shared"} if shared else {}
    killed(fake, tmp_path / "v1", run="mine", **options)
    [(name, left)] = fake.adapters.items()
    with fake.engine(run="mine", **options) as engine:
        for version in (1, 2):
            folder = write_adapter(tmp_path / f"v{version}", adapter_tensors(tiny_llama(), seed=1 + version))
            run(engine.publish(version, folder))
            run(sample(engine))
            assert fake.adapters[fake.asked()[-1]["model"]].weights == weights_of(folder)
        assert fake.asked()[-1]["model"] == "mine-v2" and engine.counters["renamed"] == 1
    assert fake.adapters == {name: left} == {"mine-v1": left}, "what is not ours stays"


def test_what_another_process_loads_meanwhile_is_not_taken_for_ours(adapter: Adapter) -> None:
    """The same name from the same folder: only an answer of our own can have been lost."""
    fake = FakeVLLM()
    with fake.engine() as engine:
        folder = adapter(1)
        fake.adapters["r0-v1"] = Loaded(str(folder), weights_of(folder))
        with pytest.raises(EngineError, match="has an adapter r0-v1 from .*v1 already.*give another run="):
            run(engine.publish(1, folder))
        assert engine.newest == 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_load_whose_answer_never_came_is_tried_again_under_another_name(
    adapter: Adapter, tmp_path: Path, shared: bool
) -> None:
    """What it may have loaded is unloaded with the next version that is; until then its folder stays."""
    fake, copies = FakeVLLM(), tmp_path / "shared"
    original = fake._load

    async def load(body: dict[str, Any]) -> Any:
        await original(body)
        return 503, "the proxy lost it"

    folder, options = adapter(1), {"adapter_dir": copies} if shared else {}
    with fake.engine(retries=0, **options) as engine:
        fake._load = load  # type: ignore[method-assign]
        with pytest.raises(EngineUnreachable):
            run(engine.publish(1, folder))
        fake._load = original  # type: ignore[method-assign]
        run(engine.publish(1, folder))
        run(sample(engine))
        used = fake.asked()[-1]["model"]
        assert engine.newest == 1 and used.startswith("r0-v1-") and [*fake.adapters] == ["r0-v1", used]
        assert all(Path(loaded.root).is_dir() for loaded in fake.adapters.values())
        run(engine.publish(2, adapter(2)))
        fake.inject("500", path="/v1/unload")  # of version 1, whose folder stays too
        with pytest.raises(EngineUnreachable):
            run(engine.retire(1))
        assert [*fake.adapters] == ["r0-v1", used, "r0-v2"]
        run(engine.publish(3, adapter(3)))
        run(engine.retire(2))
        assert [*fake.adapters] == ["r0-v3"]
        assert not shared or [str(copy) for copy in copies.iterdir()] == [fake.adapters["r0-v3"].root]


def test_a_load_in_doubt_ends_with_the_engine(adapter: Adapter, tmp_path: Path) -> None:
    """The server loads it, and nobody waits any more for its answer."""
    fake, copies, loads = FakeVLLM(), tmp_path / "shared", threading.Event()
    original = fake._load

    async def load(body: dict[str, Any]) -> Any:
        await original(body)
        loads.set()
        await asyncio.Event().wait()

    async def give_up(engine: VLLMEngine) -> None:
        publishing = asyncio.create_task(engine.publish(1, adapter(1)))
        assert await asyncio.to_thread(loads.wait, 60)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing

    with fake.engine(adapter_dir=copies) as engine:
        fake._load = load  # type: ignore[method-assign]
        run(give_up(engine))
        [loaded] = fake.adapters.values()
        assert Path(loaded.root).is_dir()
    assert fake.adapters == {} and list(copies.iterdir()) == []


def test_a_refused_publish_leaves_nothing_behind(adapter: Adapter, tmp_path: Path) -> None:
    fake = FakeVLLM(max_lora_rank=2)
    with fake.engine(adapter_dir=tmp_path / "shared") as engine:
        with pytest.raises(EngineError, match="--max-lora-rank 8, or train with r=2"):
            run(engine.publish(1, adapter(1)))
        assert fake.adapters == {} and list((tmp_path / "shared").iterdir()) == []
        fake.max_lora_rank = 4
        run(engine.publish(1, tmp_path / "v1"))
        assert engine.newest == 1


def test_closing_unloads_what_it_loaded(adapter: Adapter) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        run(engine.publish(1, adapter(1)))
        assert list(fake.adapters) == ["r0-v1"]
    assert fake.adapters == {}
    with pytest.raises(EngineError, match="closed"):
        run(engine.generate(PROMPT, PARAMS))
    engine.shutdown()  # again is no error


def test_a_link_that_leads_elsewhere_is_another_folder(adapter: Adapter, tmp_path: Path) -> None:
    """``latest`` is published as 1 and, after it was pointed elsewhere, as 2; then the server restarts."""
    fake, latest = FakeVLLM(), tmp_path / "latest"
    one, two = adapter(1), adapter(2)
    latest.symlink_to(one)
    with fake.engine() as engine:
        run(engine.publish(1, latest))
        before = run(sample(engine))
        latest.unlink()
        latest.symlink_to(two)
        run(engine.publish(2, latest))
        fake.restart()
        assert run(sample(engine, 1)) == before != run(sample(engine, 2))
        assert [fake.adapters[f"r0-v{k}"].root for k in (1, 2)] == [str(one), str(two)]


def test_what_is_in_adapter_dir_keeps_the_path_that_both_see(tmp_path: Path) -> None:
    fake, mounted = FakeVLLM(), tmp_path / "mounted"
    mounted.mkdir()
    (tmp_path / "shared").symlink_to(mounted)
    inside = write_adapter(tmp_path / "shared" / "v1", adapter_tensors(tiny_llama()))
    with fake.engine(adapter_dir=tmp_path / "shared") as engine:
        run(engine.publish(1, inside))
        assert fake.adapters["r0-v1"].root == str(inside)


def test_an_unload_that_is_refused_keeps_the_folder(adapter: Adapter) -> None:
    fake = FakeVLLM()
    with fake.engine(retries=0) as engine:
        run(engine.publish(1, adapter(1)))
        run(engine.publish(2, adapter(2)))
        fake.inject("500", path="/v1/unload")
        with pytest.raises(EngineUnreachable, match="unload_lora_adapter fails: 500"):
            run(engine.retire(1))
