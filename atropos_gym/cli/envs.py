"""``atropos-gym envs``: the ready environments with their random and optimal scores."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module

from atropos_gym.cli.command import Command
from atropos_gym.cli.environment import make_env
from atropos_gym.envs import ENVIRONMENTS
from atropos_gym.errors import MissingData

__all__ = ["run", "table"]

HEAD = ("id", "random", "optimal", "turns", "task")


def run(command: Command) -> int:
    """Prints the list."""
    print(table([_row(env_id) for env_id in ENVIRONMENTS], HEAD))
    print("Scores are mean returns of an episode: exact where the task has few states, else –.")
    return 0


def _row(env_id: str) -> tuple[str, ...]:
    module, _, name = ENVIRONMENTS[env_id].partition(":")
    task = getattr(import_module(module), name)
    says = (inspect.getdoc(task) or "").splitlines()[0]
    try:
        env = make_env(env_id, {})
    except MissingData:  # its data are not on this machine, which listing it does not need
        return env_id, "–", "–", str(task.max_turns), says
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
