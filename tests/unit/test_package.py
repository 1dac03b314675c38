"""The package as a whole: light to import, honest about its names, one way to import each room."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

import atropos_gym

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "fastapi", "peft", "stable_baselines3", "math_verify", "sympy")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    code = f"import sys, atropos_gym; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert python(code) == "[]"


def test_import_takes_under_half_a_second_of_cpu() -> None:
    code = "import time; t = time.process_time(); import atropos_gym; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.5


@pytest.mark.parametrize("name", [n for n in atropos_gym.__all__ if n != "__version__"])
def test_each_public_name_loads(name: str) -> None:
    assert getattr(atropos_gym, name) is not None
    assert name in dir(atropos_gym)


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="GroupCollector"):
        atropos_gym.Colector  # noqa: B018


def test_a_name_of_the_extra_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['stable_baselines3'] = None; import atropos_gym\n"
        "try: atropos_gym.GRPO\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    said = "GRPO needs stable_baselines3, which is not installed: pip install 'atropos-gym[learn]'"
    assert python(code) == said


@pytest.mark.parametrize("folder", ["wrappers", "envs", "trainers"])
def test_an_outer_folder_cannot_be_imported_by_its_bare_name(folder: str) -> None:
    with pytest.raises(ImportError, match=f"atropos_gym.{folder}"):
        importlib.import_module(folder)


@pytest.mark.parametrize("name", ["tests", "examples", "atropos_gym"])
def test_nothing_else_of_a_clone_becomes_part_of_the_package(name: str) -> None:
    assert importlib.util.find_spec(f"atropos_gym.{name}") is None


def test_ids_are_registered_by_importing_the_package() -> None:
    code = "import atropos_gym, gymnasium as g; print(g.make('atropos/Blackjack-v0').spec.id)"
    assert python(code) == "atropos/Blackjack-v0"


def test_the_module_form_needs_no_import() -> None:
    code = "import gymnasium as g; print(g.make('atropos_gym:atropos/Blackjack-v0').spec.id)"
    assert python(code) == "atropos/Blackjack-v0"


def test_registering_twice_changes_nothing() -> None:
    before = dict(gym.registry)
    importlib.reload(importlib.import_module("atropos_gym.envs")).register_environments()
    assert dict(gym.registry) == before


def test_a_pickled_spec_makes_the_environment_in_a_fresh_process() -> None:
    spec = pickle.dumps(gym.make("atropos/Blackjack-v0", describe="terse").spec)
    code = f"import pickle; env = pickle.loads({spec!r}).make(); print(env.reset(seed=3)[0].tolist())"
    here = gym.make("atropos/Blackjack-v0", describe="terse").reset(seed=3)[0].tolist()
    assert python(code) == str(here)
