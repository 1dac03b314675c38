"""What vLLM servers say of the model that they serve: its name, its context, where it is from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atropos_gym.engines._vllm_replica import VLLMReplica
from atropos_gym.errors import ConfigError, EngineTimeout
from atropos_gym.tokenizers import Tokenizer, load_tokenizer

__all__ = ["Served", "ask_what_is_served", "find_tokenizer"]

#: Seconds for what a server says of itself at the start.
_CONNECT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """The base model as the servers describe it.

    Attributes:
        name: that requests call it by.
        root: the server's folder of it, or its name on a hub.
        max_context: most ids of prompt and completion.
        adapters: names that are taken: what was loaded before, by whomever.
    """

    name: str
    root: str
    max_context: int
    adapters: frozenset[str] = frozenset()


async def ask_what_is_served(replicas: Sequence[VLLMReplica], wanted: str | Path | None) -> Served:
    """Asks every replica; they must agree.

    Args:
        replicas: all of them.
        wanted: served name or folder of the model; the only one served if None.

    Raises:
        ConfigError: another model is served, or several different ones.
        EngineUnreachable: a replica is not there.
        EngineTimeout: one does not answer.
    """
    name = None if wanted is None else str(wanted)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            listed = [await one.models() for one in replicas]
    except TimeoutError as error:
        raise EngineTimeout(f"no server says what it serves within {_CONNECT_SECONDS:g} s") from error
    first, *others = [
        _base_model(models, name, one.url) for models, one in zip(listed, replicas, strict=True)
    ]
    for replica, served in zip(replicas[1:], others, strict=True):
        if (served.name, served.max_context) != (first.name, first.max_context):
            raise ConfigError(
                f"replicas must serve one model: {replicas[0].url} has {first.name} with "
                f"{first.max_context} ids, {replica.url} has {served.name} with {served.max_context}"
            )
    taken = frozenset(name for models in listed for name, entry in models.items() if entry.get("parent"))
    return replace(first, adapters=taken)


def _base_model(served: dict[str, dict[str, Any]], wanted: str | None, url: str) -> Served:
    """Returns which of the served models is the base that is wanted."""
    bases = {name: entry for name, entry in served.items() if not entry.get("parent")}
    named = [name for name, entry in bases.items() if wanted and wanted in (name, entry.get("root"))]
    # The server may see the learner's folder under another path; check() compares numbers.
    if not named and len(bases) == 1 and (wanted is None or Path(wanted).expanduser().is_dir()):
        named = list(bases)
    if not named:
        wish = "give model=" if wanted is None else f"not {wanted!r}: give another model="
        raise ConfigError(f"{url} serves {', '.join(bases) or 'no model'}; {wish}")
    name = named[0]
    context = bases[name].get("max_model_len")
    if type(context) is not int or context < 2:
        raise ConfigError(f"{url} does not say max_model_len of {name} in /v1/models: is it a vLLM server?")
    return Served(name, str(bases[name].get("root") or name), context)


def find_tokenizer(given: Any, served: Served, model: str | Path | None) -> Tokenizer:
    """Returns the tokenizer that was given, or that of the model's folder.

    Raises:
        ConfigError: none was given and no folder of the model is here.
    """
    if given is not None:
        return load_tokenizer(given)
    for folder in (model, served.root):
        if folder is not None and Path(folder).expanduser().is_dir():
            return load_tokenizer(Path(folder))
    raise ConfigError(
        f"the server's model {served.name} is at {served.root}, which is no folder here: give tokenizer="
    )
