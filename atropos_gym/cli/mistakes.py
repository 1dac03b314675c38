"""Which exceptions are a user's mistake, and the one line that is said about each.

What is listed nowhere here is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import importlib

from atropos_gym.errors import AtroposError, missing_extra

__all__ = ["as_mistake", "need_learner"]


def as_mistake(error: BaseException) -> str | None:
    """Returns what to tell the user, or None where the error is not theirs.

    Example:
        >>> as_mistake(ModuleNotFoundError("no", name="torch"))
        "this needs torch, which is not installed: pip install 'atropos-gym[learn]'"
        >>> as_mistake(KeyError("x")) is None
        True
    """
    if isinstance(error, AtroposError):
        return _line(error)
    if isinstance(error, ModuleNotFoundError):
        if package := missing_extra(error):
            return f"this needs {package}, which is not installed: pip install 'atropos-gym[learn]'"
        return None
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"no permission for {error.filename!r}; choose another place"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the disk for {error.filename!r}; free some and go on with --resume"
    return None


def need_learner() -> None:
    """Raises ModuleNotFoundError, which becomes the line above, where the extra ``learn`` is missing.

    A verb that needs it says so before it spends the user's time.
    """
    # torch first: the others say in lines of their own that they miss it.
    for module in ("torch", "transformers", "peft", "stable_baselines3"):
        importlib.import_module(module)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
