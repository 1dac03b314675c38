"""The bodies of the HTTP API (the Atropos rollout API and what our server adds), as pydantic models.

Shapes: ``[n][len]`` is a list per sequence of a list per token; n sequences make a group. A body that cannot
be used is refused with the path of the first bad place; what a model lets pass can be stored and served as it
is. Only what lies in the body is checked here: limits that a trainer sets are the server's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, to_json

from atropos_gym import _wire_checks as checks

__all__ = [
    "Ack",
    "EnvRef",
    "EnvRegistration",
    "Extend",
    "Nack",
    "Policy",
    "PolicyUpdate",
    "Registration",
    "ScoredDataGroup",
    "policy_version_of",
    "says_complete",
]

MAX_TOKEN_ID = 2**31 - 1


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "true and false are not numbers")
    return value


def _empty_is_none(value: Any) -> Any:
    # Environments of Atropos send [] or {} in every optional field that they do not fill.
    return None if isinstance(value, list | dict) and not value else value


# Ids and masks are integers in the strict sense: "1", 1.0 and true would each be somebody's mistake.
TokenId = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKEN_ID)]
MaskId = Annotated[int, Field(strict=True, ge=-(2**31), le=MAX_TOKEN_ID)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Settings are read as the original reads them: "8" and 8.0 are 8.
Integer = Annotated[int, BeforeValidator(_no_bool)]
# They are calculated with: beyond 64 bits a number is no setting but a mistake.
Setting = Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)]
Real = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]

# The first bad number of a list ends it: a million bad ones are not a million errors.
FirstOnly = Field(fail_fast=True)
TokenRow = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
TokenRows = Annotated[list[TokenRow], Field(min_length=1, fail_fast=True)]
MaskRows = Annotated[list[Annotated[list[MaskId], FirstOnly]], FirstOnly]
NumberRow = Annotated[list[Number], FirstOnly]
NumberRows = Annotated[list[NumberRow], FirstOnly]
TeacherIds = Annotated[list[Annotated[list[Annotated[list[TokenId], FirstOnly]], FirstOnly]], FirstOnly]
TeacherLogprobs = Annotated[list[NumberRows], FirstOnly]
Messages = Annotated[list[Annotated[list[dict[str, Any]], FirstOnly]], FirstOnly]
EmptyIsNone = BeforeValidator(_empty_is_none)


class ScoredDataGroup(BaseModel):
    """One group: n sequences sampled from one start, with their scores. Keys are those of the wire.

    Attributes:
        tokens: int ``[n][len]``, prompt and sampled ids, unpadded.
        masks: int ``[n][len]``, -100 where not trained, else the id itself; not shifted.
        scores: float ``[n]``, one reward a sequence.
        advantages: float ``[n][len]`` or None; per-token advantages that win over scores.
        ref_logprobs: float ``[n][len]`` or None.
        messages: ``[n][turns]`` of role/content dicts or None.
        generation_params: sampling settings of the group; ``temperature`` is read by trainers.
        inference_logprobs: float ``[n][len]``; 1.0 at every untrained position.
        overrides: one dict a sequence or None.
        group_overrides: free keys of the group or None.
        images: opaque.
        env_id: the sender's registration.
        distill_token_ids: int ``[n][len][k]`` or None.
        distill_logprobs: float ``[n][len][k]`` or None.

    An empty list or dict in an optional field is None. Making one checks everything (pydantic's
    ``ValidationError`` names the first bad place); ``ScoredDataGroup.model_construct`` checks nothing.
    With the context ``{"foreign_masks": "keep"}`` masks may be anything, and logprobs stay as they are then.

    >>> group = ScoredDataGroup(tokens=[[5, 6, 7]], masks=[[-100, 6, 7]], scores=[1.0])
    >>> group.size, group.token_count, group.policy_version
    (1, 3, None)
    """

    model_config = ConfigDict(extra="ignore")

    tokens: TokenRows
    masks: MaskRows
    scores: NumberRow
    advantages: Annotated[NumberRows | None, EmptyIsNone] = None
    ref_logprobs: Annotated[NumberRows | None, EmptyIsNone] = None
    messages: Annotated[Messages | None, EmptyIsNone] = None
    generation_params: Annotated[dict[str, Any] | None, EmptyIsNone] = None
    inference_logprobs: Annotated[NumberRows | None, EmptyIsNone] = None
    overrides: Annotated[Annotated[list[dict[str, Any]], FirstOnly] | None, EmptyIsNone] = None
    group_overrides: Annotated[dict[str, Any] | None, EmptyIsNone] = None
    images: Annotated[Any, EmptyIsNone] = None
    env_id: Annotated[int, Field(ge=0), BeforeValidator(_no_bool)] | None = None
    distill_token_ids: Annotated[TeacherIds | None, EmptyIsNone] = None
    distill_logprobs: Annotated[TeacherLogprobs | None, EmptyIsNone] = None

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        """Holds what the fields must satisfy together."""
        keep_foreign = bool(info.context and info.context.get("foreign_masks") == "keep")
        lengths = list(map(len, self.tokens))
        checks.check_lengths("masks", self.masks, lengths)
        checks.check_rows("scores", len(self.scores), len(lengths))
        for name in ("advantages", "ref_logprobs", "inference_logprobs"):
            if (rows := getattr(self, name)) is not None:
                checks.check_lengths(name, rows, lengths)
        trained = checks.check_masks(self.tokens, self.masks, keep_foreign=keep_foreign)
        if self.inference_logprobs is not None and trained is not None:
            self.inference_logprobs = checks.clean_logprobs(self.inference_logprobs, trained)
        if self.overrides is not None:
            checks.check_rows("overrides", len(self.overrides), len(lengths))
        if self.messages is not None:
            checks.check_rows("messages", len(self.messages), len(lengths))
            checks.check_messages(self.messages)
        checks.check_teacher(self.distill_token_ids, self.distill_logprobs, lengths)
        return self

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

    @property
    def token_count(self) -> int:
        """Number of ids in all sequences."""
        return sum(map(len, self.tokens))

    @property
    def policy_version(self) -> int | None:
        """The lowest policy version that sampled in this group; None where the sender does not say."""
        return policy_version_of(self.group_overrides)

    @property
    def complete(self) -> bool:
        """Whether the sender says that these are all sequences of the group."""
        return says_complete(self.group_overrides, len(self.tokens))

    def to_json(self) -> bytes:
        """Returns the group as compact JSON: every key, null where absent.

        Only ``inference_logprobs`` is left out when absent: trainers test for the key and cannot take null.
        A NaN somewhere in a free field stays visible as ``NaN``, so that a server can refuse it.
        """
        values = dict(self.__dict__)
        if values["inference_logprobs"] is None:
            del values["inference_logprobs"]
        return to_json(values, inf_nan_mode="constants")


def policy_version_of(group_overrides: Mapping[str, Any] | None) -> int | None:
    """The lowest policy version that sampled in a group; None where its sender does not say."""
    version = (group_overrides or {}).get("policy_version")
    return version if isinstance(version, int) and not isinstance(version, bool) else None


def says_complete(group_overrides: Mapping[str, Any] | None, sequences: int) -> bool:
    """Whether the sender of a group of so many sequences says that these are all."""
    said = (group_overrides or {}).get("group_size")
    return not isinstance(said, bool) and said == sequences


class Registration(BaseModel):
    """A trainer's settings, body of POST ``/register``.

    Attributes:
        wandb_group: passed on to environments.
        wandb_project: passed on to environments.
        batch_size: sequences a batch.
        max_token_len: longest sequence that is taken; 0 or less for no limit.
        checkpoint_dir: passed on; the server opens no path made from it.
        save_checkpoint_interval: passed on.
        starting_step: the step a resumed trainer goes on from.
        num_steps: passed on.
        groups_per_update: batches by groups instead of sequences.
        max_policy_lag: groups older than this many versions are set aside.
        exact_batches: never deliver fewer sequences than ``batch_size``.
    """

    wandb_group: str
    wandb_project: str
    batch_size: Annotated[Setting, Field(ge=1)]
    max_token_len: Setting
    checkpoint_dir: str
    save_checkpoint_interval: Setting
    starting_step: Annotated[Setting, Field(ge=0)]
    num_steps: Setting
    groups_per_update: Annotated[Setting, Field(ge=1)] | None = None
    max_policy_lag: Annotated[Setting, Field(ge=0)] | None = None
    exact_batches: bool = False


def _clean_name(value: Any) -> Any:
    if value is None:
        return "env"
    if not isinstance(value, str):
        return value
    # Environments join this name into file paths, and it becomes a label and part of log lines.
    return re.sub(r"[^A-Za-z0-9._-]", "", value).lstrip(".") or "env"


class EnvRegistration(BaseModel):
    """An environment's settings, body of POST ``/register-env``.

    Attributes:
        max_token_length: longest sequence that it sends.
        desired_name: its name; what is not a letter, digit, dot, dash or underscore is left out.
        weight: its wish for a share of the inference capacity, relative to the others'.
        group_size: sequences a group.
        min_batch_allocation: least share of a batch, 0 to 1.
    """

    max_token_length: Setting
    desired_name: Annotated[str, BeforeValidator(_clean_name)] = "env"
    weight: Annotated[Real, Field(ge=0.0)]
    group_size: Annotated[Setting, Field(ge=1)]
    min_batch_allocation: Annotated[Real, Field(ge=0.0, le=1.0)] | None = None


class EnvRef(BaseModel):
    """Names an environment."""

    env_id: Integer


class Ack(BaseModel):
    """Body of POST ``/ack``: the batch was used and will not be asked for again.

    Attributes:
        batch_id: which one.
        rank: whose part was used, where the batch goes out in parts.
    """

    batch_id: str
    rank: Annotated[Setting, Field(ge=0)] | None = None


class Nack(BaseModel):
    """Body of POST ``/nack``: the batch goes back to the head of the queue, or is dropped."""

    batch_id: str
    drop: bool = False
    reason: str = ""


class Extend(BaseModel):
    """Body of POST ``/extend``: the batch is still worked on."""

    batch_id: str
    lease_seconds: Annotated[Real, Field(ge=1.0, le=86400.0)]


class _PolicyFields(BaseModel):
    run: str = ""
    version: Annotated[Integer, Field(ge=0)] | None = None
    model_name: str | None = None
    base_model: str | None = None
    adapter_path: str | None = None
    weights_path: str | None = None
    tokenizer_fingerprint: str | None = None
    step: Integer | None = None
    finished: bool = False


class PolicyUpdate(_PolicyFields):
    """Body of POST ``/policy``: a learner's newest version, or the end of its run.

    Attributes:
        run: one incarnation of a learner.
        version: grows within a run and over runs.
        model_name: the name to ask an engine for.
        base_model: what the adapter was trained on.
        adapter_path: the adapter's folder; None is the base.
        weights_path: whole weights instead of an adapter.
        tokenizer_fingerprint: what the ids mean.
        step: the learner's own count.
        finished: the run has ended; ``version`` and ``model_name`` may be absent.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Holds that a version is named unless the run has ended."""
        for name in () if self.finished else ("version", "model_name"):
            if getattr(self, name) is None:
                checks.refuse("missing", (name,), f"{name} is required unless finished is true")
        return self


class Policy(_PolicyFields):
    """What GET ``/policy`` shows: the newest version, or ``version=None`` before the first.

    Attributes:
        published_at: Unix seconds; None before the first version.
        superseded: another trainer has registered since, and its own first version is still to come.
        held: versions that services said they still use.
    """

    published_at: float | None = None
    superseded: bool = False
    held: list[int] = []
