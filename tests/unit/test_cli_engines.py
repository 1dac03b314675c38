"""Settings of the engine on the command line: what does not fit together is said before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atropos_gym.cli import engines
from atropos_gym.cli.config import Config
from atropos_gym.cli.engines import check_engine_settings, open_named, require_fit
from atropos_gym.engines.base import Completion
from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.errors import ConfigError, EngineUnfit

URL = "vllm:http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm", "policy": "m"}, "give --vllm-python"),
        ({"engine": "hf", "vllm_python": Path("p")}, "belongs to --engine vllm"),
        ({"engine": URL, "policy": "m", "vllm_python": Path("p")}, "belongs to --engine vllm"),
        ({"engine": URL, "policy": "tiny"}, "cannot serve --policy tiny"),
        ({"engine": "vllm:http://ann:secret@gpu", "policy": "tiny"}, "--engine vllm:http://gpu cannot serve"),
        (
            {"engine": "hf:http://ann:secret@gpu", "vllm_python": Path("p")},
            "not to hf:http://gpu: leave it out",
        ),
        ({"engine": URL, "policy": "m", "swap": "restart"}, "needs --engine vllm"),
        ({"engine": URL, "policy": "m", "swap": "in_place"}, "use hot_swap"),
        ({"engine": "sglang:http://127.0.0.1:9", "policy": "m", "swap": "restart"}, "not sglang:URL"),
    ],
)
def test_what_does_not_fit_together_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_engine_settings(Config(**settings))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"swap": "in_place"},
        {"engine": URL, "policy": "m", "swap": "none"},
        {"engine": "vllm", "policy": "m", "vllm_python": Path("p"), "swap": "restart"},
    ],
)
def test_what_fits_passes(settings: dict[str, Any]) -> None:
    check_engine_settings(Config(**settings))


def test_an_engine_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(engines, "make_engine", lambda spec, **options: asked.append((spec, options)))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    open_named(Config(policy="m", dtype="bfloat16"))
    open_named(Config(engine=URL, policy="m", engine_args={"retries": 1}))
    open_named(Config(engine="vllm", policy="m", vllm_python=Path("p")))
    monkeypatch.setenv("SGLANG_API_KEY", "other")
    open_named(Config(engine="sglang:http://127.0.0.1:9", policy="m"))
    (hf, in_process), (url, connected), (launch, launched), (_, sglang) = asked
    assert hf == "hf:m" and in_process == {"model": None, "dtype": "bfloat16", "seed": 0}
    assert url == URL and connected["api_key"] == "secret" and connected["retries"] == 1
    assert connected["run"].startswith("collect-") and connected["model"] == "m"
    assert sglang["api_key"] == "other" and sglang["run"].startswith("collect-")
    assert sglang["run"] != connected["run"]
    assert launch == "vllm" and launched == {"model": "m", "dtype": "float32", "python": "p"}


def test_an_engine_elsewhere_is_tried_and_one_in_this_process_is_not() -> None:
    engine = ScriptedEngine(lambda prompt, params, number: Completion((1,), None, "length"))
    require_fit(engine)

    class Elsewhere(ScriptedEngine):
        in_process = False

    with pytest.raises(EngineUnfit, match="1 ids came with 0 logprobs -> ask the server for logprobs"):
        require_fit(Elsewhere(lambda prompt, params, number: Completion((1,), None, "length")))
