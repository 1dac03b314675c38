"""The model hub, asked once and briefly: without a network a misspelt name must not cost a minute."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from atropos_gym.errors import ConfigError

__all__ = ["beside", "hub_answers", "read_object"]

_PATIENCE = 3.0
_REMEMBERED = 60.0
_last: tuple[float, bool] | None = None


def hub_answers() -> bool:
    """Returns whether the model hub can be reached; the answer holds for a minute."""
    global _last
    if _last is None or time.monotonic() - _last[0] > _REMEMBERED:
        _last = time.monotonic(), _ask()
    return _last[1]


def _ask() -> bool:
    """Sends one request; the hub's own client would try six times, and wait between."""
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
    except Exception:  # whichever HTTP library the hub's client is built on: no answer is an answer
        return False
    return True


def beside(source: str, name: str) -> dict[str, Any]:
    """Returns a JSON file beside a tokenizer, or {} where there is none.

    Args:
        source: a folder, a file in it, or a model's name on the hub.
        name: the file.

    Raises:
        ConfigError: it holds no JSON object.
    """
    place = Path(source)
    if place.is_file():
        path: Path | None = place.parent / name
    elif place.is_dir():
        path = place / name
    else:
        from transformers.utils import cached_file

        found = cached_file(
            source,
            name,
            local_files_only=not hub_answers(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        path = None if found is None else Path(found)
    if path is None or not path.is_file():
        return {}
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds.

    Raises:
        ConfigError: it holds none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {str(path)!r} ({error}): mend the file or take it away") from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(f"{str(path)!r} must hold a JSON object, got {kind}: mend the file or take it away")
    return content
