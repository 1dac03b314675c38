"""The bridge between Gymnasium and reinforcement learning of language models.

Public names are loaded on first use, so that ``import atropos_gym`` stays light: no torch, transformers or
fastapi. Importing the package registers its environments with Gymnasium.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from atropos_gym.errors import missing_extra

__version__ = "0.1.0"

# A checkout whose links were not made (core.symlinks=false) finds the outer folders beside the package.
_here = Path(__file__).resolve().parent
if not (_here / "wrappers").is_dir() and (_here.parent / "wrappers" / "__init__.py").is_file():
    __path__.append(str(_here.parent))

_PUBLIC = {
    "BatchClient": "atropos_gym.batch_server.client",
    "ChatRenderer": "atropos_gym.rendering",
    "Completion": "atropos_gym.engines.base",
    "Feedback": "atropos_gym.messages",
    "GRPO": "atropos_gym.trainers.grpo",
    "GroupCollector": "atropos_gym.rollout.collector",
    "GroupSession": "atropos_gym.rollout.conversation",
    "GymTextEnv": "atropos_gym.wrappers.gym_text_env",
    "Message": "atropos_gym.messages",
    "Reply": "atropos_gym.messages",
    "SamplingParams": "atropos_gym.engines.base",
    "ScoredDataGroup": "atropos_gym.wire",
    "TextEnv": "atropos_gym.text_env",
    "TokenSequence": "atropos_gym.spaces",
    "ToolCall": "atropos_gym.messages",
    "evaluate": "atropos_gym.rollout.evaluation",
    "fingerprint": "atropos_gym.tokenizers",
    "load_tokenizer": "atropos_gym.tokenizers",
    "make_engine": "atropos_gym.engines",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    """Loads a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'atropos_gym' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        module = importlib.import_module(_PUBLIC[name])
    except ModuleNotFoundError as error:
        if package := missing_extra(error):
            error.msg = f"{name} needs {package}, which is not installed: pip install 'atropos-gym[learn]'"
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted([*globals(), *_PUBLIC])


from atropos_gym.envs import register_environments  # noqa: E402

register_environments()
