"""Locks what each swap mode means: beside, alone, at once, never."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from atropos_gym.engines.base import Completion, SamplingParams
from atropos_gym.engines.hf import HFEngine
from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.errors import ConfigError, EngineError, VersionExpired
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.text_env import TextEnv
from tests.tools.tiny_llama import adapter_tensors, prompts_of, tiny_llama, write_adapter

PARAMS = SamplingParams(max_tokens=4)


def make(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, params, number: [1, 258], **options)


def folder(version: int) -> Path:
    return Path(f"runs/a-v{version}")


async def ask(engine: ScriptedEngine, version: int | None = None) -> Completion:
    return (await engine.generate([1], PARAMS, version=version))[0]


async def settle() -> None:
    """Lets every task get as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="swap must be one of hot_swap"):
        make(swap="cold_swap")


# -- never ---------------------------------------------------------------------------------------------


def test_none_announces_and_stays_as_it_is() -> None:
    async def main() -> None:
        engine = make(swap="none")
        for version in (1, 2, 2):
            await engine.publish(version, folder(version))
        assert engine.newest == 0 and engine.live_versions == (0,)
        assert engine.counters["announced"] == 3 and engine.counters["published"] == 0
        assert engine.published == []
        async with engine.hold() as held:
            assert held.version == (await ask(engine, held.version)).version == 0

    asyncio.run(main())


# -- alone ---------------------------------------------------------------------------------------------


def test_restart_waits_for_who_plays_and_lets_who_begins_wait() -> None:
    async def main() -> None:
        engine = make(swap="restart")
        await engine.publish(1, folder(1))
        assert engine.live_versions == (0, 1)
        async with engine.hold() as old:
            publishing = asyncio.create_task(engine.publish(2, folder(2)))
            await settle()
            assert not publishing.done()
            assert (await ask(engine, old.version)).version == 1  # the episode plays on to its end
            beginning = engine.hold()
            entering = asyncio.create_task(beginning.__aenter__())
            asking = asyncio.create_task(ask(engine))
            await settle()
            assert not entering.done() and not asking.done()
        await publishing
        assert (await entering).version == 2 and (await asking).version == 2
        assert engine.live_versions == (0, 2) and engine.counters["retired"] == 1
        await beginning.__aexit__(None, None, None)
        with pytest.raises(VersionExpired):
            await ask(engine, 1)

    asyncio.run(main())


def test_restart_drops_holders_that_stay_too_long() -> None:
    async def main() -> None:
        engine = make(swap="restart", publish_timeout=0.0)
        for version in (1, 2):
            async with engine.hold() as held:
                await engine.publish(version, folder(version))
                assert engine.newest == version
                if version == 2:
                    with pytest.raises(VersionExpired):
                        await ask(engine, held.version)
                else:
                    assert (await ask(engine, held.version)).version == 0  # the base is always there
        assert engine.counters["version_expired"] == 2
        async with engine.hold(0) as held:
            assert (await ask(engine, held.version)).version == 0

    asyncio.run(main())


def test_a_restart_that_fails_serves_nothing_old_and_can_be_repeated(tmp_path: Path) -> None:
    async def main() -> None:
        model = tiny_llama()
        engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes", swap="restart")
        tensors = adapter_tensors(model)
        await engine.publish(1, write_adapter(tmp_path / "v1", tensors))
        with pytest.raises(EngineError, match=r"adapter_config\.json"):
            await engine.publish(2, tmp_path / "nothing")
        with pytest.raises(VersionExpired):
            await engine.generate([1], PARAMS)
        await engine.publish(3, write_adapter(tmp_path / "v3", tensors))
        [answer] = await engine.generate([1], PARAMS)
        assert answer.version == 3
        await engine.close()

    asyncio.run(main())


def test_closing_wakes_who_waits_for_a_restart() -> None:
    async def main() -> None:
        engine = make(swap="restart")
        async with engine.hold():
            publishing = asyncio.create_task(engine.publish(1, folder(1)))
            await settle()
            waiting = asyncio.create_task(ask(engine))
            await settle()
            await engine.close()
            for task in (publishing, waiting):
                with pytest.raises(EngineError, match="closed"):
                    await task

    asyncio.run(main())


# -- at once -------------------------------------------------------------------------------------------


def test_in_place_moves_holders_and_requests_on() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        engine = make(swap="in_place", delay=lambda number: gate.wait())
        async with engine.hold() as held:
            running = asyncio.create_task(ask(engine, held.version))
            await settle()
            await engine.publish(1, folder(1))  # waits for nobody
            await engine.publish(2, folder(2))
            gate.set()
            first = await running
            assert (first.version, first.last_version) == (0, 2)
            later = await ask(engine, held.version)
            assert (later.version, later.last_version) == (2, None)
        assert engine.live_versions == (2,) and engine.newest == 2
        await engine.publish(3, folder(3))  # nobody is left behind in the counts
        assert engine.counters["version_expired"] == 0
        with pytest.raises(EngineError, match="never published"):
            await ask(engine, 9)

    asyncio.run(main())


def test_in_place_changes_weights_between_two_ids_and_says_so(tmp_path: Path) -> None:
    base = tiny_llama()
    adapters = [adapter_tensors(base, seed=seed) for seed in (1, 2)]
    folders = [write_adapter(tmp_path / f"v{k + 1}", tensors) for k, tensors in enumerate(adapters)]
    engine = HFEngine(base=base.state_dict(), config=base.config, tokenizer="bytes", seed=0, swap="in_place")
    models = [base]
    for tensors in adapters:
        merged = tiny_llama()
        for key, b in tensors.items():
            if ".lora_B" in key:
                layer = merged.get_submodule(key.split(".lora_B")[0].removeprefix("base_model.model."))
                layer.weight.data += 2.0 * b @ tensors[key.replace("lora_B", "lora_A")]
        models.append(merged)

    decoder = engine._decoder
    assert decoder is not None
    forward = decoder._forward
    steps = 0
    publishers: list[threading.Thread] = []

    def swapping(*arguments: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps in (4, 7):  # in the middle of a step: the next one has the new weights
            version = len(publishers) + 1
            publisher = threading.Thread(target=engine.publish_sync, args=(version, folders[version - 1]))
            publishers.append(publisher)
            publisher.start()
            deadline = time.monotonic() + 60
            while engine.newest < version and time.monotonic() < deadline:
                time.sleep(0.001)
            assert engine.newest == version
        return forward(*arguments)

    decoder._forward = swapping  # type: ignore[method-assign]
    [prompt] = prompts_of([9])
    [sample] = engine.generate_sync(prompt, SamplingParams(max_tokens=10, seed=3))
    for publisher in publishers:
        publisher.join()
    assert (sample.version, sample.last_version, len(sample.ids)) == (0, 2, 10)
    assert sample.trainable is True

    # By hand: earlier keys and values stay as the weights of their time made them.
    of_step = [0] * 4 + [1] * 3 + [2] * 3
    cache = DynamicCache()
    ids, expected = list(prompt), []
    with torch.no_grad():
        for step, version in enumerate(of_step):
            logits = models[version](
                torch.tensor([ids]), use_cache=True, **{decoder._cache_name: cache}
            ).logits[0, -1]
            expected.append(float(logits.log_softmax(-1)[sample.ids[step]]))
            ids = [sample.ids[step]]
    np.testing.assert_allclose(np.array(sample.logprobs), np.array(expected), atol=2e-4)
    [whole] = engine.generate_sync(prompt, SamplingParams(max_tokens=4, seed=3), version=0)
    assert (whole.version, whole.last_version) == (2, None)
    engine.shutdown()


# -- in episodes ---------------------------------------------------------------------------------------


class Three(TextEnv):
    """Three turns of anything."""

    max_turns = 3
    max_turn_tokens = 4

    def begin(self, options: dict[str, Any]) -> str:
        return "go"

    def respond(self, reply: Reply) -> Feedback:
        return Feedback("on", reward=1.0)


def played(engine: ScriptedEngine, **fields: Any) -> Any:
    """One group, before whose second turn a version is published."""

    async def main() -> Any:
        collector = GroupCollector(Three, engine, group_size=2, **fields)
        [group] = await collector.acollect(1)
        collector.close()
        return group

    return asyncio.run(main())


def publishing_engine(**options: Any) -> ScriptedEngine:
    async def delay(number: int) -> None:
        while len(engine.calls) < 2:  # both have begun
            await asyncio.sleep(0)
        if number == 2:  # the first second turn
            await engine.publish(1, folder(1))

    engine = ScriptedEngine(lambda prompt, params, number: [1, 258], delay=delay, **options)
    return engine


def test_an_episode_keeps_its_version_unless_turns_take_the_newest() -> None:
    group = played(publishing_engine())
    assert [episode.versions for episode in group.episodes] == [[0, 0, 0]] * 2
    group = played(publishing_engine(), version="turn")
    versions = [episode.versions for episode in group.episodes]
    assert all(one[0] == 0 and one[-1] == 1 and one == sorted(one) for one in versions)
    assert group.policy_version == 0
    assert [entry["turn_versions"] for entry in group.to_wire().overrides] == versions
    assert all("turn_last_versions" not in entry for entry in group.to_wire().overrides)


def test_a_turn_in_which_weights_change_has_the_lowest_version_and_both_are_kept() -> None:
    group = played(publishing_engine(swap="in_place"))
    entries = group.to_wire().overrides
    moved = [entry for entry in entries if "turn_last_versions" in entry]
    assert moved and group.policy_version == 0
    for entry in moved:
        assert len(entry["turn_versions"]) == len(entry["turn_last_versions"]) == 3
        assert (0, 1) in zip(entry["turn_versions"], entry["turn_last_versions"], strict=True)
    assert type(group).from_dict(group.to_dict()) == group


def test_a_version_is_of_an_episode_or_of_a_turn() -> None:
    with pytest.raises(ConfigError, match="version must be 'episode' or 'turn', got 'step'"):
        GroupCollector(Three, make(), version="step")  # type: ignore[arg-type]


def test_requests_say_lane_and_whose_turn_they_are() -> None:
    from atropos_gym.rollout.evaluation import evaluate

    engine = make()
    played(engine)
    assert {call.lane for call in engine.calls} == {"train"}
    episodes = {call.affinity for call in engine.calls}
    assert len(episodes) == 2 and len(engine.calls) == 6
    engine = make()
    evaluate(Three, engine, 3, seed=0)
    assert {call.lane for call in engine.calls} == {"eval"}
    assert len({call.affinity for call in engine.calls}) == 3
