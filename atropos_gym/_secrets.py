"""What is secret among settings: keys and passwords by their names, and what stands before a URL's host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from atropos_gym._urls import without_token

__all__ = ["is_secret", "secrets_in", "without_secrets"]

_SECRET = {
    *("key", "apikey", "token", "secret", "password", "passwd", "passphrase"),
    *("credential", "credentials", "authorization", "auth"),
}


def is_secret(name: str) -> bool:
    """Whether a setting of this name, or a flag, holds a secret: by its last word.

    >>> [is_secret(name) for name in ("api_key", "HF_TOKEN", "--api-key", "tokenizer", "max_token_len")]
    [True, True, True, False, False]
    """
    words = re.findall(r"[a-z]+", name.lower())
    return bool(words) and words[-1] in _SECRET


def without_secrets(value: Any) -> Any:
    """Returns settings as they can be written down: secret ones are left out, URLs have no password.

    >>> without_secrets({"api_key": "s3cret", "retries": 2, "flags": ["--api-key", "s3cret", "--seed", "1"]})
    {'retries': 2, 'flags': ['--seed', '1']}
    >>> without_secrets("vllm:http://me:s3cret@host:8000")
    'vllm:http://host:8000'
    """
    if isinstance(value, Mapping):
        return {k: without_secrets(v) for k, v in value.items() if v is None or not is_secret(str(k))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in _without_flags(value)]
    return without_token(value) if isinstance(value, str) and "@" in value else value


def secrets_in(value: Any, name: str) -> list[str]:
    """Returns where in settings of this name secrets stand, without them.

    >>> secrets_in({"api_key": "s3cret", "env": {"HF_TOKEN": "s3cret"}, "retries": 2}, "engine_args")
    ['engine_args.api_key', 'engine_args.env.HF_TOKEN']
    """
    if isinstance(value, Mapping):
        return [place for key, inner in value.items() for place in _places(inner, str(key), name)]
    return [name] if without_secrets(value) != (list(value) if isinstance(value, tuple) else value) else []


def _places(value: Any, key: str, name: str) -> list[str]:
    place = f"{name}.{key}"
    if is_secret(key):
        return [] if value is None else [place]
    return secrets_in(value, place)


def _without_flags(items: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    """The words of a command line without secret flags and their values."""
    skip = False
    for item in items:
        flag, equals, _ = item.partition("=") if isinstance(item, str) else ("", "", "")
        secret = flag.startswith("--") and is_secret(flag)
        if not (skip or secret):
            yield item
        skip = secret and not equals
