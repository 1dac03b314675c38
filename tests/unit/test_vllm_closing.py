"""The end of a vLLM engine: everything is closed, whatever else fails."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.engines._remote import Answer
from atropos_gym.engines.vllm import VLLMEngine
from tests.tools.fake_vllm import FakeVLLM
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter


def adapter(folder: Path, seed: int) -> Path:
    return write_adapter(folder, adapter_tensors(tiny_llama(), seed=seed))


class Owned:
    """Stands for a launched server."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def opened(fake: FakeVLLM, shared: Path) -> tuple[VLLMEngine, Owned]:
    server = Owned()
    options: dict[str, Any] = {"tokenizer": "bytes", "adapter_dir": shared, "server": server}
    return VLLMEngine("http://fake", transport=fake.transport(), **options), server


def is_closed(engine: VLLMEngine) -> bool:
    threads = [thread for thread in threading.enumerate() if thread is engine._thread._thread]
    return engine._thread.closed and not threads and not engine._router.replicas[0].endpoint._clients


def test_closing_goes_on_whatever_an_unload_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, server = opened(FakeVLLM(), tmp_path / "shared")
    asyncio.run(engine.publish(1, adapter(tmp_path / "v1", 1)))
    asyncio.run(engine.publish(2, adapter(tmp_path / "v2", 2)))

    async def broken(method: str, path: str, body: Any = None) -> Answer:
        raise RuntimeError("of no kind that was thought of")

    monkeypatch.setattr(engine._router.replicas[0].endpoint, "ask", broken)
    engine.shutdown()
    assert is_closed(engine) and server.closed == 1 and list((tmp_path / "shared").iterdir()) == []
    assert engine.counters["left_loaded"] == 2 and "of no kind that was thought of" in caplog.text


def test_closing_goes_on_where_a_connection_does_not_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, server = opened(FakeVLLM(), tmp_path / "shared")
    asyncio.run(engine.publish(1, adapter(tmp_path / "v1", 1)))
    endpoint = engine._router.replicas[0].endpoint
    close = endpoint.close

    async def broken() -> None:
        await close()
        raise RuntimeError("and then")

    monkeypatch.setattr(endpoint, "close", broken)
    with pytest.raises(RuntimeError, match="and then"):
        engine.shutdown()
    assert is_closed(engine) and server.closed == 1 and list((tmp_path / "shared").iterdir()) == []
