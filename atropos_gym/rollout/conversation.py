"""GroupSession: groups for loops that call the model themselves.

An agent program that keeps its own loop speaks through conversations; the ids that were sampled for it become
rows as those of environments do. A conversation is a tree: it may branch, ask for several replies, start
over with another history or run several threads; each end of the tree is a row, and no sampled id is trained
twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal

from atropos_gym.engines.base import Engine, SamplingParams, sampling_trainable
from atropos_gym.errors import ConfigError, TokenizerMismatch
from atropos_gym.messages import Message, as_messages
from atropos_gym.rendering import ChatRenderer, chat_renderer
from atropos_gym.rollout._conversation import Conversation, Drawn
from atropos_gym.rollout._play import Start
from atropos_gym.rollout._tree import Tree
from atropos_gym.rollout._turns import Prompt, Said
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.tokenizers import Tokenizer

__all__ = ["Conversation", "Drawn", "GroupSession", "Prompt", "Said"]


class GroupSession:
    """Conversations from one start that are scored against each other; entered with ``async with``.

    Args:
        engine: who speaks; the version that is newest on entering is kept to the end.
        tokenizer: as for ``load_tokenizer``, or a renderer; must be the engine's. None takes the engine's.
        sampling: of every reply; its ``max_tokens`` is the most ids of one.
        seed: of the run.
        number: of the group in its run.
        name: stands for the environment's id in what is written and shown.
        same_start: refuse conversations that begin differently; False only counts them.
        alternatives: replies that the program did not go on from, though it did from another one to the same
            prompt: they are trained like the others (the program chose, so they had their part in the score),
            or, with ``"drop"``, left out and counted.

    Attributes:
        version: of the policy, once entered.
        conversations: the members, branches among them, in order.
        counts: what happened: requests, replies, and all that was left out, by reason.

    Raises:
        TokenizerMismatch: the tokenizer is not the engine's.
        ConfigError: the sampling cannot be trained on.

    Example:
        >>> async with GroupSession(engine) as session:  # doctest: +SKIP
        ...     chats = [session.conversation([{"role": "user", "content": "hi"}]) for _ in range(4)]
        ...     replies = [await chat.say() for chat in chats]
        ...     group = session.group([float(len(reply.text)) for reply in replies])
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: str | Tokenizer | ChatRenderer | Any = None,
        *,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        number: int = 0,
        name: str = "session",
        same_start: bool = True,
        alternatives: Literal["train", "drop"] = "train",
    ) -> None:
        self.engine = engine
        source = engine.tokenizer if tokenizer is None else tokenizer
        self.renderer = source if isinstance(source, ChatRenderer) else chat_renderer(source)
        own = self.renderer.tokenizer
        if own.fingerprint != engine.tokenizer.fingerprint:
            raise TokenizerMismatch(
                f"the session speaks the ids of tokenizer {own.name}, engine {engine.model} those of "
                f"{engine.tokenizer.name}: leave tokenizer= out"
            )
        sampling = sampling or SamplingParams(max_tokens=512)
        trainable = sampling_trainable(sampling)
        if trainable is not True:
            raise ConfigError(f"sampling with {trainable} cannot be trained on: leave it out")
        if alternatives not in ("train", "drop"):
            raise ConfigError(f"alternatives must be 'train' or 'drop', got {alternatives!r}")
        stop_ids = tuple(dict.fromkeys([*sampling.stop_ids, *self.renderer.stop_ids]))
        self.sampling = sampling.with_(stop_ids=stop_ids)
        self.seed = seed
        self.number = number
        self.name = name
        self.same_start = same_start
        self.alternatives = alternatives
        self.version: int | None = None
        self.conversations: list[Conversation] = []
        self.counts: Counter[str] = Counter()
        self._start = Start(name, seed, remedy="begin every conversation of a session with the same messages")
        self._hold = AsyncExitStack()

    async def __aenter__(self) -> GroupSession:
        held = await self._hold.enter_async_context(self.engine.hold())
        self.version = held.version
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.version = None
        await self._hold.aclose()

    def conversation(
        self, messages: str | Sequence[Message] = (), *, tools: Sequence[Any] | None = None
    ) -> Conversation:
        """Begins a conversation; the first prompt is the same for all of a session.

        Args:
            messages: what is said before the first reply; nothing yet where ``ask`` brings it.
            tools: schemas of what the policy may call, or functions.

        Raises:
            UnequalStarts: it differs from that of an earlier conversation.
        """
        chat = Conversation(self, len(self.conversations), as_messages(messages), tools, Tree(self.renderer))
        if chat.messages:
            chat.find(chat.messages, tools)
        self.conversations.append(chat)
        return chat

    def group(self, scores: Sequence[float | None]) -> EpisodeGroup:
        """Returns the conversations so far as a group.

        What several branches share is trained in the first of them that has a score.

        Args:
            scores: one for each conversation, in order; None leaves it out.

        Raises:
            ConfigError: another number of scores, a conversation without a reply, or none is left.
        """
        if len(scores) != len(self.conversations):
            raise ConfigError(
                f"{len(self.conversations)} conversations need as many scores, got {len(scores)}"
            )
        trained: set[Said] = set()
        scored = [
            chat.episode(float(score), trained)
            for chat, score in zip(self.conversations, scores, strict=True)
            if score is not None
        ]
        if not scored:
            raise ConfigError("no conversation has a score: a group needs one at least")
        self.counts["unscored conversations"] = len(scores) - len(scored)
        self.counts["alternatives left out"] = sum(len(chat.left_out()) for chat in self.conversations)
        return EpisodeGroup(
            env=self.name,
            number=self.number,
            episodes=scored,
            policy_version=min(version for episode in scored for version in episode.versions),
            temperature=self.sampling.temperature,
            tokenizer_fingerprint=self.engine.tokenizer.fingerprint,
        )

    def check_start(self, prompt: list[int], member: int) -> None:
        """Compares a member's first prompt with the others'.

        Raises:
            UnequalStarts: they differ, and the session wants them the same.
        """
        if self.same_start:
            self._start.check(prompt, member)
        elif self._start.prompt is None:
            self._start.prompt = prompt
        else:
            self.counts["unequal starts"] += self._start.prompt != prompt
