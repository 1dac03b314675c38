"""The swap modes of the vLLM engine, against the fake server: beside, alone on a restarted server, never."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import ConfigError
from tests.tools.fake_vllm import FakeVLLM
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter

PARAMS = SamplingParams(max_tokens=4, seed=1)


class Server:
    """Stands for a launched server."""

    def __init__(self, fake: FakeVLLM) -> None:
        self.fake = fake
        self.restarts: list[set[str]] = []  # what was loaded when it was ended

    def restart(self) -> None:
        self.restarts.append(set(self.fake.adapters))
        self.fake.restart()

    def close(self) -> None:
        pass


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    model = tiny_llama()
    return [write_adapter(tmp_path / f"v{k}", adapter_tensors(model, seed=k)) for k in (1, 2, 3)]


def test_none_announces_and_loads_nothing(folders: list[Path]) -> None:
    fake = FakeVLLM()
    with fake.engine(swap="none") as engine:
        for version, folder in enumerate(folders, start=1):
            asyncio.run(engine.publish(version, folder))
        assert engine.newest == 0 and engine.counters["announced"] == 3
        [answer] = asyncio.run(engine.generate([1, 2], PARAMS))
        assert answer.version == 0 and fake.asked()[-1]["model"] == "m"
    assert fake.asked("/v1/load_lora_adapter") == []


def test_restart_drains_starts_anew_and_serves_one_version(folders: list[Path]) -> None:
    async def main() -> None:
        fake = FakeVLLM()
        server = Server(fake)
        with fake.engine(swap="restart", server=server) as engine:
            await engine.publish(1, folders[0])
            async with engine.hold() as held:
                publishing = asyncio.create_task(engine.publish(2, folders[1]))
                waiting = asyncio.create_task(engine.generate([1, 2], PARAMS))
                [answer] = await engine.generate([1, 2], PARAMS, version=held.version)
                assert answer.version == 1 and len(server.restarts) == 1
                assert not publishing.done()
            await publishing
            [later] = await waiting
            assert later.version == 2 and set(fake.adapters) == {"r0-v2"}
            assert server.restarts == [set(), set()]  # whatever was loaded was unloaded first
            assert engine.counters["version_expired"] == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("swap", "message"),
    [("in_place", "use 'hot_swap'"), ("restart", "launch it"), ("sometimes", "swap must be one of")],
)
def test_modes_that_cannot_be_are_refused(swap: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), FakeVLLM().engine(swap=swap):
        pass
