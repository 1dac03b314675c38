"""The package's exceptions.

Every message is one line for a person: what is wrong, with which value, and what to do. The command line
prints it and exits with 2; a traceback is shown only with ``--debug``.
"""

from __future__ import annotations

__all__ = [
    "AnswerRefused",
    "AtroposError",
    "CollectionFailed",
    "ConfigError",
    "ContextFull",
    "EngineError",
    "EngineTimeout",
    "EngineUnfit",
    "EngineUnreachable",
    "GroupRefused",
    "MissingData",
    "NewSegment",
    "PostUnsure",
    "PromptTooLong",
    "ServerError",
    "TemplateError",
    "TokenizerMismatch",
    "UnequalStarts",
    "UnusableGold",
    "VerifierError",
    "VersionExpired",
    "missing_extra",
]


class AtroposError(Exception):
    """Base of all exceptions that this package raises on purpose."""


class ConfigError(AtroposError, ValueError):
    """A setting has a value that cannot work; the message names setting, value and remedy."""


class MissingData(AtroposError, FileNotFoundError):
    """A model, data set or optional dependency is not there; the message says how to get it."""


class TemplateError(AtroposError, ValueError):
    """A chat template cannot be used as asked; the message names template, role and remedy."""


class NewSegment(AtroposError):
    """The conversation cannot go on in this segment; the caller renders a new prompt.

    Attributes:
        reason: why the ids so far cannot be extended.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PromptTooLong(AtroposError, ValueError):
    """A first prompt does not fit in the environment's limits; the message names the numbers."""


class TokenizerMismatch(AtroposError, ValueError):
    """Two parts use different tokenizers; the message names both."""


class EngineError(AtroposError, RuntimeError):
    """An inference engine refused a request or gave an answer that cannot be trusted."""


class VersionExpired(EngineError):
    """The policy version asked for is no longer served."""


class ContextFull(EngineError):
    """The prompt leaves too little of the model's context for a reply: the episode is over, not the run."""


class AnswerRefused(EngineError):
    """An engine's answer cannot be trusted; the message names the first thing that is wrong with it."""


class EngineTimeout(EngineError):
    """An engine did not answer before the request's deadline."""


class EngineUnreachable(EngineError):
    """An engine cannot be reached, or fails at every try."""


class EngineUnfit(EngineError):
    """What was tried of an engine makes training on it wrong; the message has every finding and remedy."""


class UnequalStarts(AtroposError, ValueError):
    """Two members of a group, reset with one seed, read different prompts; the message names the position."""


class CollectionFailed(AtroposError, RuntimeError):
    """So many groups in a row were lost that going on makes no sense; the message says to what."""


class ServerError(AtroposError, RuntimeError):
    """The batch server refused a request.

    Attributes:
        status: HTTP status, or None where no answer came.
        detail: the server's own ``detail``: a list of ``{type, loc, msg}`` for 422, else a text.
    """

    def __init__(self, message: str, *, status: int | None = None, detail: object = None) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


class GroupRefused(ServerError):
    """The server refused a group (422); ``detail`` names the first bad place."""


class PostUnsure(GroupRefused):
    """A post was unanswered for 23 h, and servers know posts for 24 h at most: again, it could come twice.

    A server that gets more than 400,000 posts in that time forgets the oldest before, and logs a warning: the
    same post may then come twice although no error says so.
    """


class UnusableGold(AtroposError, ValueError):
    """A reference answer cannot be read: its row must yield no reward at all."""


class VerifierError(AtroposError, RuntimeError):
    """The process in which answers are compared symbolically cannot be started; the message says why."""


def missing_extra(error: ImportError) -> str | None:
    """Returns the package of the extra ``learn`` that is missing, or None where another one is.

    Example:
        >>> missing_extra(ModuleNotFoundError("no", name="torch.nn"))
        'torch'
    """
    package = (error.name or "").split(".")[0]
    return package if package in _LEARN else None


# What the core does without; pyproject.toml has the extra.
_LEARN = {"torch", "transformers", "peft", "stable_baselines3", "safetensors", "tqdm"}
