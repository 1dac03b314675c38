"""All that was said within one conversation, as a tree: prompts, and the turns that were sampled after them.

A program sends its whole history with every request. Where that history is what was said so far, the next
prompt is the ids so far and a bridge; where it is not, a new segment begins. One turn can be followed in
several ways (branches), and one prompt can have several turns (n replies, parallel requests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from atropos_gym.errors import TemplateError
from atropos_gym.messages import Message, Reply
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout._echo import Key, echo_of, key_of
from atropos_gym.rollout._tools import ToolForm, joined

__all__ = ["Prompt", "Said", "Tree", "line_of"]


@dataclass(slots=True, eq=False)
class Prompt:
    """Ids after which turns are sampled.

    Attributes:
        ids: what follows the turn before; the whole prompt where a segment begins.
        after: the turn that was said before; None at a start.
        fresh: a segment begins here.
        heard: the messages that the ids hold and no prompt before.
        text: everything up to here, where a program works with text itself.
        said: the turns that were sampled after it.
    """

    ids: list[int]
    after: Said | None
    fresh: bool
    heard: list[Message]
    text: str | None = None
    said: list[Said] = field(default_factory=list)

    def whole(self) -> list[int]:
        """Returns all ids of the segment up to here."""
        if self.fresh or self.after is None:
            return list(self.ids)
        line = line_of(self.after)
        return [id_ for said in line for id_ in (*said.prompt.ids, *said.ids)] + self.ids


@dataclass(slots=True, eq=False)
class Said:
    """One sampled turn.

    Attributes:
        prompt: what it was sampled after.
        ids: as the engine returned them.
        logprobs: one for each.
        version: of the policy.
        last_version: of the last id, where weights changed in mid-flight; else None.
        cut: no end id was sampled.
        trainable: True, or why its ids are not trained.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        reply: what it says.
        message: as it was answered to the program.
        reward: where the program gave one to this turn.
        followed: the prompts that go on from it, by what was said.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    logprobs: Sequence[float]
    version: int
    cut: bool
    trainable: Literal[True] | str
    finish_reason: str
    reply: Reply
    message: Message
    last_version: int | None = None
    reward: float | None = None
    followed: dict[Hashable, Prompt] = field(default_factory=dict)

    @property
    def spoken(self) -> Message:
        """All that was said, as one message: what a template renders."""
        return Message(role="assistant", content=self.reply.text)


def line_of(said: Said) -> list[Said]:
    """Returns the turns of one segment up to ``said``, in order."""
    line = [said]
    while not line[-1].prompt.fresh and (before := line[-1].prompt.after) is not None:
        line.append(before)
    return line[::-1]


@dataclass(slots=True, eq=False)
class _Start:
    """A prompt that is no continuation, and what its messages are known by."""

    keys: list[Key]
    prompt: Prompt


class Tree:
    """Finds where a request goes on.

    Args:
        renderer: writes messages as ids.

    Attributes:
        counts: how many segments began, by reason.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self.form = ToolForm(renderer)
        self.counts: Counter[str] = Counter()
        self._starts: dict[str, list[_Start]] = {}
        self._raw: dict[Hashable, Prompt] = {}
        self._said: list[Said] = []
        self._calls: dict[str, list[Said]] = {}

    def chat(self, messages: Sequence[Message], tools: list[Any] | None, known: str = "") -> Prompt:
        """Returns the prompt of a conversation.

        Args:
            messages: all of it; the last one is not the assistant's.
            tools: schemas.
            known: what the tools are known by.

        Raises:
            TemplateError: the template refuses the messages.
        """
        keys = [key_of(message) for message in messages]
        starts = self._starts.setdefault(known, [])
        for start in starts:
            depth = len(start.keys)
            if keys[:depth] == start.keys:
                found = self._along(start.prompt, depth, messages, keys, tools)
                if found is not None:
                    return found
        opening, ids = self._prompt(self._openings(messages, tools), tools)
        prompt = Prompt(ids, None, True, opening)
        if any(self._starts.values()):
            spoken = any(message["role"] == "assistant" for message in messages)
            self.counts["rewritten history" if spoken else "another start"] += 1
        starts.append(_Start(keys, prompt))
        return prompt

    def ids(self, ids: Sequence[int]) -> Prompt:
        """Returns the prompt of ids that a program wrote itself: a longer one of what was said, if it is."""
        wanted = list(ids)
        best: Said | None = None
        length = 0
        for said in self._said:
            so_far = [*said.prompt.whole(), *said.ids]
            if length < len(so_far) < len(wanted) and wanted[: len(so_far)] == so_far:
                best, length = said, len(so_far)
        rest = wanted[length:]
        follows: dict[Hashable, Prompt] = self._raw if best is None else best.followed
        key = ("ids", tuple(rest))
        if key not in follows:
            heard = [Message(role="user", content=self.renderer.tokenizer.decode(rest))]
            follows[key] = Prompt(rest, best, best is None, heard)
        return follows[key]

    def text(self, text: str) -> Prompt:
        """Returns the prompt of a text that a program wrote itself; no template is involved.

        It goes on from a turn where it begins with all of it, and with its end where that was sampled.
        """
        best: Said | None = None
        length = 0
        for said in self._said:
            so_far = self._text_after(said)
            if so_far is not None and length < len(so_far) < len(text) and text.startswith(so_far):
                best, length = said, len(so_far)
        rest = text[length:]
        follows: dict[Hashable, Prompt] = self._raw if best is None else best.followed
        key = ("text", rest)
        if key not in follows:
            heard = [Message(role="user", content=rest)]
            follows[key] = Prompt(self._written(rest), best, best is None, heard, text)
        return follows[key]

    def add(self, said: Said) -> None:
        """Keeps a turn that was sampled."""
        said.prompt.said.append(said)
        self._said.append(said)
        for call in said.message.get("tool_calls", ()):
            self._calls.setdefault(call["id"], []).append(said)

    def _along(
        self,
        prompt: Prompt,
        depth: int,
        messages: Sequence[Message],
        keys: list[Key],
        tools: list[Any] | None,
    ) -> Prompt | None:
        """Follows a conversation from a prompt that holds its first messages to its end, where it leads."""
        ways = [(prompt, depth)]
        while ways:
            prompt, at = ways.pop()
            if at == len(keys):
                return prompt
            end = next((i for i in range(at + 1, len(keys)) if messages[i]["role"] == "assistant"), len(keys))
            further: list[tuple[Prompt, int]] = []
            for said in _echoed(prompt, messages[at]):
                block = tuple(keys[at + 1 : end])
                if end == len(keys):
                    return self._follow(said, block, messages[at + 1 :], tools)
                if (follower := said.followed.get(block)) is not None:
                    further.append((follower, end))
            ways += reversed(further)
        return None

    def _follow(
        self, said: Said, block: tuple[Key, ...], messages: Sequence[Message], tools: list[Any] | None
    ) -> Prompt:
        """Returns the prompt that goes on from a turn with what was said next."""
        if block in said.followed:
            return said.followed[block]
        heard = self._readable(messages)
        history = _history(said)
        try:
            ids, fresh = self._advance(said, history, heard, tools)
        except TemplateError:  # what a template does not take one after another, or only at the beginning
            try:
                heard = joined(heard)
                ids, fresh = self._advance(said, history, heard, tools)
            except TemplateError:
                whole = [*history, *heard]
                (_, ids), fresh = self._prompt([whole, joined(whole)], tools), True
        if fresh:
            self.counts["template"] += 1
        said.followed[block] = Prompt(ids, said, fresh, heard)
        return said.followed[block]

    def _advance(
        self, said: Said, history: list[Message], heard: list[Message], tools: list[Any] | None
    ) -> tuple[list[int], bool]:
        return self.renderer.advance(said.prompt.whole(), said.ids, history, heard, self.form.shown(tools))

    def _openings(self, messages: Sequence[Message], tools: list[Any] | None) -> Iterator[list[Message]]:
        """Yields a conversation in all the forms that a template may take, the truest first.

        Some look into a message's calls, and do not find those that stand there as they were said.
        """
        said = self._readable(messages)
        yield self.form.opening(said, tools)
        yield self.form.opening([self._read(message, as_said=False) for message in messages], tools)
        yield self.form.opening(joined(said), tools)

    def _prompt(
        self, forms: Iterable[list[Message]], tools: list[Any] | None
    ) -> tuple[list[Message], list[int]]:
        """Returns the first form of a conversation that the template takes, and its ids.

        Raises:
            TemplateError: it takes none of them; what it said of the first.
        """
        refused: list[TemplateError] = []
        for form in forms:
            try:
                return form, self.renderer.prompt(form, self.form.shown(tools))
            except TemplateError as error:
                refused.append(error)
        raise refused[0]

    def _readable(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages as the template takes them; the calls of our own replies as they were said."""
        return [self._read(message) for message in messages]

    def _read(self, message: Message, *, as_said: bool = True) -> Message:
        plain: Any = {key: value for key, value in message.items() if key in _READ and value is not None}
        plain.setdefault("content", "")
        if plain["role"] == "developer":
            plain["role"] = "system"
        elif plain["role"] == "tool" and (called := self._calls.get(str(plain.get("tool_call_id")))):
            names = {call["id"]: call["function"]["name"] for call in called[-1].message["tool_calls"]}
            plain.setdefault("name", names[plain["tool_call_id"]])
        if plain["role"] != "assistant":
            return cast(Message, plain)
        ids = [call.get("id") for call in plain.get("tool_calls", ()) if as_said]
        for own in self._calls.get(ids[0], ()) if ids else ():  # models give ids too, and not always new ones
            raw = self.form.raw_content(own.reply)
            if raw is not None and echo_of(own.message, own.reply, message):
                return Message(role="assistant", content=raw)
        return self.form.written(cast(Message, plain))

    def _text_after(self, said: Said) -> str | None:
        """Returns the text up to the end of a turn; None where text cannot say what was sampled."""
        if said.prompt.text is None:
            return None
        text = self.renderer.tokenizer.decode(said.ids)
        if "\ufffd" in text or (not said.cut and text == said.reply.text):  # half a character; an end unseen
            return None
        return said.prompt.text + text

    def _written(self, text: str) -> list[int]:
        """Returns ids of a text whose author may write control tokens: the program itself."""
        backend: Any = getattr(self.renderer.tokenizer, "backend", None)
        if backend is None:
            return self.renderer.tokenizer.encode(text)
        return list(backend.encode(text, add_special_tokens=False).ids)


_READ = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


def _echoed(prompt: Prompt, message: Message) -> list[Said]:
    """Returns the turns after a prompt that a message may be, the surest first, of equal ones the latest."""
    thoughts = message.get("reasoning_content")
    found = [
        (
            echo_of(said.message, said.reply, message),
            said.message.get("reasoning_content") == thoughts,
            n,
            said,
        )
        for n, said in enumerate(prompt.said)
    ]
    return [one[-1] for one in sorted(found, key=lambda one: one[:-1], reverse=True) if one[0]]


def _history(said: Said) -> list[Message]:
    """Returns the conversation up to a turn, over segments that the template began."""
    parts: list[Message] = []
    at: Said | None = said
    while at is not None:
        parts.append(at.spoken)
        parts += reversed(at.prompt.heard)
        at = at.prompt.after
    return parts[::-1]
