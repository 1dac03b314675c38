"""One member of a session: what it said, and asking for what it says next.

A conversation is a tree (``_tree.py``); here is the loop of one thread over it, and the one place where
replies are sampled into it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from atropos_gym.engines.base import Completion, SamplingParams
from atropos_gym.errors import ConfigError, EngineError
from atropos_gym.messages import Message, Reply, as_messages
from atropos_gym.parsing.tool_calls import check_tools
from atropos_gym.rendering.said import checked_messages, checked_tools, images_of
from atropos_gym.rollout._leaves import rows_of
from atropos_gym.rollout._sampling import cut_at, sample
from atropos_gym.rollout._tools import answer_of, check_calls
from atropos_gym.rollout._tree import Tree
from atropos_gym.rollout._turns import Prompt, Said
from atropos_gym.rollout.episode import Episode
from atropos_gym.rollout.seeds import sampling_seed

if TYPE_CHECKING:
    from atropos_gym.rollout.conversation import GroupSession

__all__ = ["Conversation", "Drawn"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Replies that were sampled and that nobody was told yet.

    Attributes:
        prompt: what they were sampled after.
        params: how.
        number: of the request, from 0 in each conversation.
        completions: as the engine returned them.
    """

    prompt: Prompt
    params: SamplingParams
    number: int
    completions: Sequence[Completion]


class Conversation:
    """One member of a session.

    ``say`` keeps a loop of one thread: it answers ``messages``, which ``add`` makes longer. Whoever changes
    ``messages``, or passes others, begins a new segment where they are no longer what was said. ``ask`` is
    for programs that keep the history themselves; any number of them may run at a time.

    Attributes:
        member: its number in the session.
        messages: what was said so far.
        tools: what the policy may call.
    """

    def __init__(
        self,
        session: GroupSession,
        member: int,
        messages: list[Message],
        tools: Sequence[Any] | None,
        tree: Tree,
        origin: Said | None = None,
    ) -> None:
        self.member = member
        self.messages = messages
        self.tools = tools
        self._session = session
        self._tree = tree
        self._origin = origin
        self._own: list[Said] = []
        self._last: list[Said] = [] if origin is None else [origin]
        self._asked = 0
        self._begun = False
        self._speaking = False

    def add(self, message: str | Message | Sequence[Message]) -> None:
        """Adds what somebody else said: one message or several; a string is the user's."""
        self.messages.extend(as_messages([Message(**message)] if isinstance(message, Mapping) else message))

    @overload
    async def say(self, messages: Sequence[Message] | None = None, *, n: None = None) -> Reply: ...
    @overload
    async def say(self, messages: Sequence[Message] | None = None, *, n: int) -> list[Reply]: ...

    async def say(
        self, messages: Sequence[Message] | None = None, *, n: int | None = None
    ) -> Reply | list[Reply]:
        """Samples the next reply and adds it to the conversation.

        Args:
            messages: the whole conversation in place of ``messages``: its past may be another one.
            n: sample so many replies and return them all; the conversation goes on from the first one unless
                ``take`` or ``branch`` says otherwise.

        Raises:
            ConfigError: outside of the session, nothing was added since the last reply, or an earlier
                ``say`` is not through.
            TemplateError: the template refuses the messages.
            EngineError: the engine failed; the conversation is as it was.
        """
        if self._speaking:
            raise ConfigError(
                f"conversation {self.member} is speaking: await its say() before the next one, or branch()"
            )
        talk = self.messages if messages is None else as_messages(messages)
        place = len(talk)
        self._speaking = True
        try:
            said = await self.ask(talk, tools=self.tools, n=1 if n is None else n, plain=True)
        finally:
            self._speaking = False
        self._last = said
        self.messages = talk
        self.messages.insert(place, said[0].message)  # what was added meanwhile comes after it
        return said[0].reply if n is None else [one.reply for one in said]

    def take(self, reply: Reply) -> None:
        """Goes on from another of the replies that the last ``say`` returned.

        Raises:
            ConfigError: it is none of them, or something was added already.
        """
        said = self._find(reply)
        if not self.messages or self.messages[-1] is not self._last[0].message:
            raise ConfigError("take() comes right after say(n=...): branch() goes on from an earlier reply")
        self._last = [said, *(one for one in self._last if one is not said)]
        self.messages[-1] = said.message

    def branch(self, reply: Reply | None = None) -> Conversation:
        """Returns a new conversation of the session that goes on from here, with a score of its own.

        Args:
            reply: go on from this one of the replies that the last ``say`` returned.

        Raises:
            ConfigError: it is none of them.
        """
        session = self._session
        messages = list(self.messages)
        origin = self._last[0] if self._last else None
        if reply is not None:
            origin = self._find(reply)
            last = self._last[0].message
            place = next((place for place, one in enumerate(messages) if one is last), None)
            if place is None:
                raise ConfigError("the conversation went on with another past: branch() without a reply")
            messages[place:] = [origin.message]
        new = Conversation(session, len(session.conversations), messages, self.tools, self._tree, origin)
        new._begun = True
        if origin is not None and origin is not self._last[0] and origin in self._own:
            self._own.remove(origin)  # from now on it is the branch's, and so is its score
            new._own.append(origin)
        session.conversations.append(new)
        return new

    def reward(self, value: float, reply: Reply | None = None) -> None:
        """Gives a turn a reward of its own: the last one, or that of a reply of the last ``say``."""
        said = self._find(reply) if reply is not None else (self._last[0] if self._last else None)
        if said is None:
            raise ConfigError(f"conversation {self.member} has no reply yet: say() before reward()")
        said.reward = float(value)

    def find(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Prompt:
        """Returns where a conversation goes on: the prompt that its next reply is sampled after.

        Raises:
            ConfigError: nothing was said since the last reply, or the tools cannot be used.
            TemplateError: the template refuses the messages.
        """
        if self._own and not messages:
            raise ConfigError("nothing was said: add() a message before say()")
        messages = _with_content(messages)
        checked_messages(messages)
        check_calls(messages)
        if messages and messages[-1]["role"] == "assistant":
            raise ConfigError("nothing was said since the last reply: add() a message before say()")
        if images_of(messages):
            raise ConfigError("an engine gets ids alone: say in words what an image shows")
        schemas = checked_tools(tools)
        if schemas:
            check_tools(schemas)
        known = json.dumps(schemas, sort_keys=True, default=repr) if schemas else ""
        return self._begin(self._tree.chat(messages, schemas, known))

    def find_raw(self, prompt: str | Sequence[int]) -> Prompt:
        """Returns the prompt of a text or of ids that the program wrote itself, without any template.

        It goes on from what was said where it begins with all of it.

        Raises:
            ConfigError: it is empty, or has ids that the model has not.
        """
        if not prompt:
            raise ConfigError("the prompt is empty: a reply is sampled after at least one id")
        if isinstance(prompt, str):
            return self._begin(self._tree.text(prompt))
        rows = self._session.engine.tokenizer.rows
        if wrong := [id_ for id_ in prompt if not 0 <= id_ < rows]:
            raise ConfigError(f"the prompt has the id {wrong[0]}; those of this model lie below {rows}")
        return self._begin(self._tree.ids(prompt))

    async def ask(
        self,
        messages: Sequence[Message] | Prompt,
        *,
        tools: Sequence[Any] | None = None,
        n: int = 1,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        plain: bool = False,
    ) -> list[Said]:
        """Samples replies to a whole conversation; where its past is what was said, its ids go on.

        Args:
            messages: the conversation, or a prompt that was found.
            tools: schemas of what the policy may call.
            n: how many replies.
            sampling: in place of the session's; what differs from it in kind is kept but not trained.
            stop: texts at which a reply ends.
            plain: answer with all that was said as one text, thoughts and calls within it.

        Raises:
            ConfigError, TemplateError: as ``find``.
            EngineError: the engine failed, or the prompt does not fit.
        """
        prompt = messages if isinstance(messages, Prompt) else self.find(messages, tools)
        return self.keep(
            [await self.draw(prompt, n=n, sampling=sampling)], tools=tools, stop=stop, plain=plain
        )

    async def draw(self, prompt: Prompt, *, n: int = 1, sampling: SamplingParams | None = None) -> Drawn:
        """Samples replies without saying them: nothing is trained that ``keep`` is not given.

        Args:
            prompt: from ``find`` or ``find_raw``.
            n: how many replies.
            sampling: as ``ask``'s.

        Raises:
            ConfigError: outside of the session, or n < 1.
            EngineError: the engine failed, or the prompt does not fit.
        """
        session = self._session
        if session.version is None:
            raise ConfigError("say() needs an entered session: async with GroupSession(...) as session")
        if n < 1:
            raise ConfigError(f"n must be >= 1, got {n}")
        number, self._asked = self._asked, self._asked + 1
        session.counts["requests"] += 1
        params = session.sampling if sampling is None else sampling.with_(stop_ids=session.sampling.stop_ids)
        try:
            completions = await sample(
                session.engine,
                prompt.whole(),
                params,
                n,
                version=session.version,
                seed_of=lambda attempt: sampling_seed(
                    session.seed, session.number, self.member, number, attempt
                ),
                affinity=self._affinity,
                on_abort=self._aborted,
            )
        except EngineError as error:
            session.counts[f"failed: {type(error).__name__}"] += 1
            raise
        except BaseException:
            session.counts["cancelled"] += 1
            raise
        return Drawn(prompt, params, number, completions)

    def keep(
        self,
        drawn: Sequence[Drawn],
        *,
        tools: Sequence[Any] | None = None,
        stop: Sequence[str] = (),
        plain: bool = False,
    ) -> list[Said]:
        """Says what was drawn, all of it or, where it raises, nothing; the arguments are as ``ask``'s."""
        replies = [
            self._reply(one, completion, place, tools, stop, plain)
            for one in drawn
            for place, completion in enumerate(one.completions)
        ]
        for said, broken in replies:
            self._add(said, broken)
        return [said for said, _ in replies]

    def episode(self, score: float, trained: set[Said] | None = None) -> Episode:
        """Returns the conversation as an episode; its last turn earned ``score`` unless turns have rewards.

        Args:
            score: of the whole conversation.
            trained: turns that are trained in other episodes; this one's are added.

        Raises:
            ConfigError: it has no reply that can be trained on, or is still speaking.
        """
        if self._speaking:
            raise ConfigError(f"conversation {self.member} is speaking: await its say() before group()")
        trained = set() if trained is None else trained
        said = list(dict.fromkeys([*_before(self._origin), *self._own]))
        rows = rows_of(said, trained, self.left_out())
        if not rows:
            what = "no reply" if not self._own else "no reply that can be trained on"
            raise ConfigError(f"conversation {self.member} has {what}: call say() before group()")
        turns = [turn for row in rows for turn in row.turns]
        if all(one.reward is None for one in self._own):
            turns[-1].reward = score
        return Episode(
            rows=rows,
            rewards=[turn.reward for turn in turns],
            messages=[*self.messages] or [message for row in rows for message in row.messages],
            end_reason="session",
            success=None,
            truncated=False,
            invalid_turns=0,
            seed=self._session.seed,
            member=self.member,
            score=score,
        )

    @property
    def sampled_ids(self) -> list[tuple[int, ...]]:
        """The ids of each reply of its own, in the order of asking."""
        return [said.ids for said in self._own]

    @property
    def trainable(self) -> bool:
        """Whether it has a reply of its own that can be trained on."""
        left_out = self.left_out()
        return any(said.trainable is True and said.ids for said in self._own if said not in left_out)

    @property
    def segments(self) -> Counter[str]:
        """How often a segment began after the first one, by reason."""
        return self._tree.counts

    def left_out(self) -> set[Said]:
        """Returns the alternatives that the session drops."""
        if self._session.alternatives == "train":
            return set()
        continued = {said.prompt for said in self._own if said.followed}
        return {said for said in self._own if not said.followed and said.prompt in continued}

    @property
    def _affinity(self) -> Hashable:
        session = self._session
        return (session.name, session.seed, session.number, id(self._tree))

    def _begin(self, prompt: Prompt) -> Prompt:
        """Compares the first prompt of all with the other members'."""
        if not self._begun:
            self._session.check_start(prompt.whole(), self.member)
            self._begun = True
        return prompt

    def _aborted(self) -> None:
        self._session.counts["aborted"] += 1

    def _reply(
        self,
        drawn: Drawn,
        completion: Completion,
        place: int,
        tools: Sequence[Any] | None,
        stop: Sequence[str],
        plain: bool,
    ) -> tuple[Said, int]:
        """Returns one completion as a turn, and how many of its calls cannot be read."""
        session, params = self._session, drawn.params
        completion, word = cut_at(completion, stop, session.renderer.tokenizer)
        reply = session.renderer.reply(completion.ids)
        read = self._tree.writing.form.read(reply, checked_tools(tools), (self.member, drawn.number, place))
        reply.tool_calls = read.calls if tools else reply.tool_calls
        said = Said(
            prompt=drawn.prompt,
            ids=completion.ids,
            logprobs=completion.logprobs or (),
            version=completion.version,
            cut=frozenset(params.stop_ids).isdisjoint(completion.ids),
            trainable=self._trainable(completion, params),
            finish_reason="tool_calls" if read.calls else completion.finish_reason,
            reply=reply,
            message=answer_of(reply, read, word, plain=plain),
            last_version=completion.last_version,
        )
        return said, read.broken

    def _add(self, said: Said, broken: int) -> None:
        """Puts a turn into the tree."""
        self._tree.add(said)
        self._own.append(said)
        counts = self._session.counts
        counts["replies"] += 1
        counts["ids"] += len(said.ids)
        counts["unread calls"] += broken
        if said.trainable is not True:
            counts[f"untrainable: {said.trainable}"] += 1

    def _trainable(self, completion: Completion, params: SamplingParams) -> Literal[True] | str:
        if completion.trainable is not True:
            return completion.trainable
        if params.temperature != self._session.sampling.temperature:
            return f"temperature={params.temperature:g}"
        return True

    def _find(self, reply: Reply) -> Said:
        for said in self._last:
            if said.reply is reply:
                return said
        raise ConfigError("this reply is none of those that the last say() returned")


def _with_content(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns messages in which an assistant that said nothing, null to some programs, has empty content."""
    if not isinstance(messages, list | tuple):
        return messages
    return [_said_nothing(message) for message in messages]


def _said_nothing(message: Message) -> Message:
    plain: Any = message
    if isinstance(plain, Mapping) and plain.get("role") == "assistant" and plain.get("content") is None:
        return cast(Message, {**plain, "content": ""})
    return message


def _before(said: Said | None) -> list[Said]:
    """Returns all turns up to one, over segments, in order."""
    found: list[Said] = []
    while said is not None:
        found.append(said)
        said = said.prompt.after
    return found[::-1]
