"""GroupSession: groups for loops that call the model themselves.

An agent program that keeps its own loop speaks through conversations; the ids that were sampled for it become
rows as those of environments do. Tool calls, branches and rewritten histories are not known here yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from atropos_gym.engines.base import Engine, SamplingParams, sampling_trainable
from atropos_gym.errors import ConfigError, EngineError, TokenizerMismatch
from atropos_gym.messages import Message, Reply, as_messages
from atropos_gym.rendering import ChatRenderer, chat_renderer
from atropos_gym.rollout._play import EpisodeFailed, Plan, Start, complete
from atropos_gym.rollout._rows import BrokenIds, RowBuilder
from atropos_gym.rollout.episode import Episode, EpisodeGroup
from atropos_gym.rollout.seeds import sampling_seed
from atropos_gym.tokenizers import Tokenizer

__all__ = ["Conversation", "GroupSession"]


class GroupSession:
    """Conversations from one start that are scored against each other; entered with ``async with``.

    Args:
        engine: who speaks; the version that is newest on entering is kept to the end.
        tokenizer: as for ``load_tokenizer``; must be the engine's. None takes the engine's.
        sampling: of every reply; its ``max_tokens`` is the most ids of one.
        seed: of the run.
        number: of the group in its run.
        name: stands for the environment's id in what is written and shown.

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
        tokenizer: str | Tokenizer | Any = None,
        *,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        number: int = 0,
        name: str = "session",
    ) -> None:
        self.engine = engine
        self.renderer: ChatRenderer = chat_renderer(engine.tokenizer if tokenizer is None else tokenizer)
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
        stop_ids = tuple(dict.fromkeys([*sampling.stop_ids, *self.renderer.stop_ids]))
        self.sampling = sampling.with_(stop_ids=stop_ids)
        self.seed = seed
        self.number = number
        self.name = name
        self.version: int | None = None
        self.conversations: list[Conversation] = []
        self._start = Start(name, seed, remedy="begin every conversation of a session with the same messages")
        self._hold = AsyncExitStack()

    async def __aenter__(self) -> GroupSession:
        held = await self._hold.enter_async_context(self.engine.hold())
        self.version = held.version
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._hold.aclose()

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """Begins a conversation; the first prompt is the same for all of a session.

        Raises:
            UnequalStarts: it differs from that of an earlier conversation.
        """
        said = as_messages(messages)
        member = len(self.conversations)
        prompt = self.renderer.prompt(said)
        self._start.check(prompt, member)
        self.conversations.append(Conversation(self, member, said, prompt))
        return self.conversations[-1]

    def group(self, scores: Sequence[float | None]) -> EpisodeGroup:
        """Returns the conversations so far as a group.

        Args:
            scores: one for each conversation, in order; None leaves it out.

        Raises:
            ConfigError: another number of scores, a conversation without a reply, or none is left.
        """
        if len(scores) != len(self.conversations):
            raise ConfigError(
                f"{len(self.conversations)} conversations need as many scores, got {len(scores)}"
            )
        scored = [
            chat.episode(float(score))
            for chat, score in zip(self.conversations, scores, strict=True)
            if score is not None
        ]
        if not scored:
            raise ConfigError("no conversation has a score: a group needs one at least")
        return EpisodeGroup(
            env=self.name,
            number=self.number,
            episodes=scored,
            policy_version=min(version for episode in scored for version in episode.versions),
            temperature=self.sampling.temperature,
            tokenizer_fingerprint=self.engine.tokenizer.fingerprint,
        )


class Conversation:
    """One member of a session.

    Attributes:
        messages: what was said so far.
    """

    def __init__(
        self, session: GroupSession, member: int, messages: list[Message], prompt: list[int]
    ) -> None:
        self.messages = messages
        self._session = session
        self._rows = RowBuilder(prompt, 0)
        self._segment = 0
        self._turns = 0
        self._heard = len(messages)  # how many messages the ids so far hold
        self._plan = Plan(
            start=session._start,
            member=member,
            chance=None,
            sampling=session.sampling,
            seed_of=lambda turn, attempt: sampling_seed(session.seed, session.number, member, turn, attempt),
        )

    def add(self, message: Message | Sequence[Message]) -> None:
        """Adds what somebody else said: one message or several."""
        self.messages.extend(as_messages([message] if isinstance(message, Mapping) else message))

    async def say(self) -> Reply:
        """Samples the next reply and adds it to the conversation.

        Raises:
            ConfigError: outside of the session, or nothing was added since the last reply.
            EngineError: the engine failed.
        """
        session = self._session
        if session.version is None:
            raise ConfigError("say() needs an entered session: async with GroupSession(...) as session")
        if self._turns:
            self._listen()
        rows = self._rows
        try:
            completion = await complete(
                session.engine, rows.prompt, session.sampling, session.version, self._plan, self._turns
            )
            rows.sample(completion, frozenset(session.sampling.stop_ids))
        except (EpisodeFailed, BrokenIds) as failure:
            raise EngineError(str(failure)) from failure
        self._turns += 1
        reply = session.renderer.reply(completion.ids)
        self.messages.append(Message(role="assistant", content=reply.text))
        rows.hear(self.messages)
        self._heard = len(self.messages)
        return reply

    def episode(self, score: float) -> Episode:
        """Returns the conversation as an episode whose last turn earned ``score``."""
        if not self._turns:
            raise ConfigError(f"conversation {self._plan.member} has no reply: call say() before group()")
        turns = [turn for row in self._rows.rows for turn in row.turns]
        turns[-1].reward = score
        return Episode(
            rows=self._rows.rows,
            rewards=[turn.reward for turn in turns],
            messages=list(self.messages),
            end_reason="session",
            success=None,
            truncated=False,
            invalid_turns=0,
            seed=self._session.seed,
            member=self._plan.member,
            score=score,
        )

    def _listen(self) -> None:
        """Puts what was added behind the last reply, in ids."""
        said = self.messages[self._heard :]
        if not said:
            raise ConfigError("nothing was said since the last reply: add() a message before say()")
        row = self._rows.rows[-1]
        start = row.turns[-1].start
        ids, new = self._session.renderer.advance(
            row.ids[:start], row.ids[start:], self.messages[: self._heard], said
        )
        self._segment += new
        self._rows.observe(ids if new else [*row.ids, *ids], self._segment, reward=0.0, ended=False)
