"""The README's Python runs as it stands: in a plain interpreter, and inside a running event loop."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

PLAIN = "{blocks}\n"
IN_A_LOOP = """
import asyncio
names = {{"__name__": "readme"}}
async def main():
    exec({blocks!r}, names)
asyncio.run(main())
"""


def run(form: str, blocks: list[str], folder: Path) -> str:
    script = folder / "readme.py"
    script.write_text(form.format(blocks="\n".join(blocks)))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def cpu_seconds() -> float:
    """What finished children have computed: a busy machine makes no difference to it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_there_are_snippets() -> None:
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize("form", [PLAIN, IN_A_LOOP], ids=["plain", "in a running event loop"])
def test_all_snippets_run(form: str, tmp_path: Path) -> None:
    run(form, BLOCKS, tmp_path)


def test_an_environment_of_ones_own_is_learned_in_under_a_minute(tmp_path: Path) -> None:
    before = cpu_seconds()
    out = run(PLAIN, BLOCKS[:2], tmp_path)
    seconds = cpu_seconds() - before
    random, trained = map(float, out.split())
    assert random < 0.5
    assert trained > 0.95
    assert seconds < 60
