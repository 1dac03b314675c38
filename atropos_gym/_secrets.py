"""What is secret among settings: keys and passwords by their names, and parts of URLs and headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any
from urllib.parse import unquote

from atropos_gym._urls import without_token

__all__ = ["is_secret", "secrets_in", "without_secrets"]

#: Last words of names, in the singular.
_SECRET = {
    *("key", "token", "secret", "password", "passwd", "passphrase", "passcode"),
    *("credential", "authorization", "auth", "oauth", "jwt", "bearer", "cookie"),
}

#: The same where words are written in one: not any ``key``, for there are monkeys.
_COMPOUND = re.compile(
    r".*(?:password|passwd|passphrase|secret|credential|cookie"
    r"|(?:api|access|account|auth|client|hf|hub|id|private|refresh|secret|session|shared)(?:key|token))s?"
)

#: Words before the last one that make a token one of text, or a number of tokens, and a key one of data.
_COUNTS = {"max", "min", "num", "n", "total"}
_SPECIAL = {
    *("bos", "eos", "pad", "unk", "mask", "sep", "cls", "eot", "eom", "boi", "eoi", "boa", "eoa", "fim"),
    *("start", "begin", "stop", "end", "prefix", "middle", "suffix", "newline", "think", "special", "added"),
    *("image", "video", "audio"),
}
_SPENT = {
    *("prompt", "completion", "context", "input", "output", "reply", "response", "turn", "text", "action"),
    *("new", "extra", "bad", "cached", "batched", "draft", "prefill", "decode", "generated"),
    *("reasoning", "thinking", "budget", "visible"),
}
_DATA = {
    *("sort", "group", "cache", "partition", "primary", "foreign", "column", "dict", "public"),
    *("prompt", "question", "answer", "text", "image", "label", "input", "output", "target", "score"),
}

_URL = re.compile(r"(?:\w+:)?\w[\w+.-]*://")
_QUERY = re.compile(r"[?#]((?:(?!,\w+://).)*)", re.DOTALL)
_HEADER = re.compile(
    r"(\s*(?:[\w-]*(?:authorization|cookie|api-key)\s*:|bearer(?=\s+\S+\s*$)))\s*\S.*", re.I | re.S
)


def is_secret(name: str) -> bool:
    """Whether a setting of this name, or a flag, holds a secret: by its last word.

    >>> [is_secret(name) for name in ("api_key", "HF_TOKEN", "--api-key", "accessTokens", "Cookie")]
    [True, True, True, True, True]
    >>> [is_secret(name) for name in ("tokenizer", "max_token_len", "eos_token", "max_tokens", "sort_key")]
    [False, False, False, False, False]
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words:
        return False
    *before, last = words
    nearest = before[-1] if before else ""
    if last in ("token", "tokens") and (nearest in _SPECIAL or not _COUNTS.isdisjoint(before)):
        return False
    if (last == "tokens" and nearest in _SPENT) or (last in ("key", "keys") and nearest in _DATA):
        return False
    whole = re.findall(r"[a-z]+", name.lower())[-1]
    return last.removesuffix("s") in _SECRET or _COMPOUND.fullmatch(whole) is not None


def without_secrets(value: Any) -> Any:
    """Returns settings as they can be written down: the very same object where nothing in it is secret.

    Secret settings and flags are left out; URLs lose passwords and secret parts of their query, and headers
    what stands behind ``Authorization:``.

    >>> without_secrets({"api_key": "s3cret", "retries": 2, "flags": ["--api-key", "s3cret", "--seed", "1"]})
    {'retries': 2, 'flags': ['--seed', '1']}
    >>> without_secrets("vllm:http://me:s3cret@host:8000/?api_key=s3cret")
    'vllm:http://host:8000/'
    """
    if isinstance(value, Mapping):
        plain = {k: without_secrets(v) for k, v in value.items() if not _holds(str(k), v)}
        same = len(plain) == len(value) and all(map(is_, plain.values(), value.values()))
        return value if same else plain
    if isinstance(value, (list, tuple)):
        words = [without_secrets(item) for item in _without_flags(value)]
        if len(words) == len(value) and all(map(is_, words, value)):
            return value
        return tuple(words) if isinstance(value, tuple) else words
    return _plain(value) if isinstance(value, str) else value


def secrets_in(value: Any, name: str) -> list[str]:
    """Returns where in settings of this name secrets stand, without them.

    >>> secrets_in({"api_key": "s3cret", "env": {"HF_TOKEN": "s3cret"}, "retries": 2}, "engine_args")
    ['engine_args.api_key', 'engine_args.env.HF_TOKEN']
    """
    if isinstance(value, Mapping):
        return [place for key, inner in value.items() for place in _places(inner, str(key), name)]
    return [] if without_secrets(value) is value else [name]


def _places(value: Any, key: str, name: str) -> list[str]:
    place = f"{name}.{key}"
    return [place] if _holds(key, value) else secrets_in(value, place)


def _holds(name: str, value: Any) -> bool:
    """Whether a setting of this name has a value that is secret: nothing and a switch are not."""
    if value is None or isinstance(value, bool) or (isinstance(value, (str, Mapping, list)) and not value):
        return False
    items = value if isinstance(value, (list, tuple)) else [value]
    if name.lower().endswith("tokens") and all(isinstance(item, (int, float)) for item in items):
        return False  # so many tokens, or their ids
    return is_secret(name)


def _without_flags(items: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    """The words of a command line without secret flags and their values, of which there may be several."""
    skip = False
    for item in items:
        flag, equals, _ = item.partition("=") if isinstance(item, str) else ("", "", "")
        skip = skip and not flag.startswith("-")
        if skip:
            continue
        if is_secret(flag) and re.fullmatch(r"[\w.-]+" if equals else r"-[\w.-]+", flag):
            skip = not equals
        else:
            yield item


def _plain(text: str) -> str:
    """A text without what is secret in the URLs or the header that it is."""
    if header := _HEADER.fullmatch(text):
        return header[1]
    if "://" not in text:
        return text
    words = [text] if _URL.match(text) else re.split(r"(\s+)", text)
    plain = "".join(_plain_url(word) if "://" in word else word for word in words)
    return text if plain == text else plain


def _plain_url(url: str) -> str:
    bare = without_token(url)
    return _QUERY.sub(_plain_query, url if bare == url.rstrip("/") else bare)


def _plain_query(query: re.Match[str]) -> str:
    parts = re.split(r"[&#]", query[1])
    kept = [part for part in parts if not _is_secret_parameter(part)]
    if len(kept) == len(parts):
        return query[0]
    return query[0][0] + "&".join(kept) if kept else ""


def _is_secret_parameter(part: str) -> bool:
    name, _, value = part.partition("=")
    name = unquote(name)
    return bool(value) and (is_secret(name) or name.lower().endswith(("signature", "sig")))
