"""What people install: wheel, sdist, editable install and plain clone hold the same package.

1. The wheel holds every file of the four source folders under atropos_gym/, and nothing else.
2. A wheel built from the sdist is the same.
3. In an empty environment with the core alone, the command and the environments work without torch.
4. A wheel, an editable install and a plain clone name the same modules.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTER = ("wrappers", "envs", "trainers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def source_files() -> set[str]:
    """Names that the tree says the package has, as they lie in a wheel."""
    tracked = run("git", "ls-files", "atropos_gym", *OUTER, cwd=ROOT).split()
    names = set()
    for name in tracked:
        if (ROOT / name).is_symlink():
            continue
        names.add(name if name.startswith("atropos_gym/") else f"atropos_gym/{name}")
    return names


def package_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: an unpacked sdist cannot be cloned")
    folder = tmp_path_factory.mktemp("clone") / "atropos_gym"
    run("git", "clone", "-q", ROOT, folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out / "direct", ".", cwd=clone)
    run(sys.executable, "-m", "build", "-q", "--outdir", out / "through-sdist", ".", cwd=clone)
    return {
        "direct": next((out / "direct").glob("*.whl")),
        "through sdist": next((out / "through-sdist").glob("*.whl")),
    }


@pytest.fixture(scope="module")
def core(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment with the wheel and the core's dependencies alone."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, built["direct"], cwd=folder)
    return python


@pytest.mark.parametrize("way", ["direct", "through sdist"])
def test_a_wheel_holds_exactly_the_source_files(built: dict[str, Path], way: str) -> None:
    assert package_files(built[way]) == source_files()


def test_nothing_generic_lands_in_site_packages(core: Path) -> None:
    names = [*OUTER, "tests", "examples"]
    code = f"import importlib.util as u; print([n for n in {names!r} if u.find_spec(n)])"
    assert run(core, "-c", code, cwd=core.parent).strip() == "[]"


def test_the_core_plays_without_torch(core: Path) -> None:
    code = (
        "import importlib.util as u, gymnasium as gym\n"
        "assert not u.find_spec('torch') and not u.find_spec('transformers')\n"
        "env = gym.make('atropos_gym:atropos/Blackjack-v0')\n"
        "obs, info = env.reset(seed=1)\n"
        "env.step(env.action_space.sample())\n"
        "import atropos_gym.batch_server, atropos_gym.rollout.collector\n"
        "from atropos_gym import BatchClient, GroupCollector, make_engine\n"
        "print('plays')\n"
    )
    assert run(core, "-c", code, cwd=core.parent).strip() == "plays"


def test_the_command_of_the_core_works_and_names_the_missing_extra(core: Path) -> None:
    command = core.parent / "atropos-gym"
    assert "serve" in run(command, "--help", cwd=core.parent)
    assert "atropos/Blackjack-v0" in run(command, "envs", cwd=core.parent)
    done = subprocess.run([command, "train"], cwd=core.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "atropos-gym[learn]" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_editable_install_exposes_the_package_alone(clone: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "-e", clone, cwd=tmp_path)
    code = (
        "import importlib.util as u, atropos_gym.trainers, atropos_gym.envs, atropos_gym.wrappers\n"
        "print(u.find_spec('wrappers'), atropos_gym.envs.__file__)"
    )
    out = run(python, "-c", code, cwd=tmp_path)
    assert out.startswith("None ")
    assert str(clone) in out


def test_a_checkout_without_links_still_imports(clone: Path, tmp_path: Path) -> None:
    """Where links are not made (core.symlinks=false) they are text files; ``__path__`` finds the folders."""
    copy = tmp_path / "copy"
    run(
        "git",
        "-c",
        "core.symlinks=false",
        "clone",
        "-q",
        "-c",
        "core.symlinks=false",
        clone,
        copy,
        cwd=tmp_path,
    )
    assert not (copy / "atropos_gym" / "envs").is_symlink()
    code = "import atropos_gym.envs, atropos_gym.wrappers, atropos_gym.trainers; print('ok')"
    assert run(sys.executable, "-c", code, cwd=copy, PYTHONPATH=str(copy)).strip() == "ok"


def test_no_command_leaves_the_tree_dirty(clone: Path) -> None:
    assert run("git", "status", "--porcelain", cwd=clone) == ""
