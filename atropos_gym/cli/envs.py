"""``atropos-gym envs``: the ready environments with their random and optimal scores."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module

from atropos_gym.cli.command import Command
from atropos_gym.cli.environment import make_env
from atropos_gym.envs import ENVIRONMENTS
from atropos_gym.text_env import TextEnv

__all__ = ["run", "table"]

HEAD = ("id", "random", "optimal", "turns", "task")


def run(command: Command) -> int:
    """Prints the list."""
    print(table([_row(env_id) for env_id in ENVIRONMENTS], HEAD))
    print("\nMean returns of an episode; – where they are not known.")
    return 0


def _row(env_id: str) -> tuple[str, ...]:
    module, _, name = ENVIRONMENTS[env_id].partition(":")
    task = getattr(import_module(module), name)
    says = (inspect.getdoc(task) or "").splitlines()[0].replace("`", "")
    if task.scores is TextEnv.scores:  # none are known; making it might load data for nothing
        return env_id, "–", "–", str(task.max_turns), says
    env = make_env(env_id, {})
    scores = dict(env.scores)
    env.close()
    return env_id, _score(scores.get("random")), _score(scores.get("optimal")), str(env.max_turns), says


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Returns aligned text; columns of numbers stand to the right.

    Example:
        >>> print(table([("x", "1.5"), ("long", "-10")], ("name", "value")))
        name  value
        x       1.5
        long    -10
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = []
    for row in (head, *rows):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    return cell in ("", "–") or cell.lstrip("+-−")[:1].isdigit()
