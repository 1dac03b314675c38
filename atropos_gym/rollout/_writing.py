"""What a policy reads of a conversation, as ids: its beginning, and what is told after a turn.

Templates differ in what they take: some know no tools, some want roles to alternate. What one refuses is
written in another form that says the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from atropos_gym.errors import TemplateError
from atropos_gym.messages import Message
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout._echo import echo_of
from atropos_gym.rollout._tools import ToolForm, joined, told_by_user
from atropos_gym.rollout._turns import Said, history_of

__all__ = ["Writing"]

_READ = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


class Writing:
    """Writes the messages of one conversation.

    Args:
        renderer: of its ids.

    Attributes:
        form: how the family is told of tools and writes calls.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self.form = ToolForm(renderer)
        self._calls: dict[str, list[Said]] = {}

    def learn(self, said: Said) -> None:
        """Remembers the calls of a turn: where they come back they are written as they were said."""
        for call in said.message.get("tool_calls", ()):
            self._calls.setdefault(call["id"], []).append(said)

    def opening(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[list[Message], list[int]]:
        """Returns a whole conversation in the first form that the template takes, and its ids.

        Raises:
            TemplateError: it takes none.
        """
        return self._prompt(self._openings(messages, tools), tools)

    def following(
        self, said: Said, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[list[Message], list[int], bool]:
        """Returns what is told after a turn, as messages and as ids, and whether they begin a new segment.

        Raises:
            TemplateError: the template takes it in no form.
        """
        heard = [self._read(message) for message in messages]
        try:
            return self._told(said, heard, tools)
        except TemplateError:
            if (of_user := told_by_user(heard)) == heard:
                raise
            return self._told(said, of_user, tools)

    def _told(
        self, said: Said, heard: list[Message], tools: list[Any] | None
    ) -> tuple[list[Message], list[int], bool]:
        """Does what ``following`` does, for messages in the roles that they have."""
        shown, history = self.form.shown(tools), history_of(said)
        for form in (heard, joined(heard)):
            try:
                return form, *self.renderer.advance(said.prompt.whole(), said.ids, history, form, shown)
            except TemplateError:  # not one after another; or at the beginning only, as a system message
                continue
        whole = [*history, *heard]
        _, ids = self._prompt([whole, joined(whole)], tools)
        return heard, ids, True

    def text(self, text: str) -> list[int]:
        """Returns ids of a text whose author may write control tokens: the program itself."""
        backend: Any = getattr(self.renderer.tokenizer, "backend", None)
        if backend is None:
            return self.renderer.tokenizer.encode(text)
        return list(backend.encode(text, add_special_tokens=False).ids)

    def _openings(self, messages: Sequence[Message], tools: list[Any] | None) -> Iterator[list[Message]]:
        """Yields a conversation in all the forms that a template may take, the truest first.

        Some look into a message's calls, and do not find those that stand there as they were said.
        """
        said = [self._read(message) for message in messages]
        yield self.form.opening(said, tools)
        plain = [self._read(message, as_said=False) for message in messages]
        yield self.form.opening(plain, tools)
        yield self.form.opening(joined(said), tools)
        yield self.form.opening(joined(plain), tools)
        yield self.form.opening(_of_two(said), tools)
        words = [self.form.in_words(one) if one.get("tool_calls") else one for one in said]
        yield self.form.opening(_of_two(words), tools)

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

    def _read(self, message: Message, *, as_said: bool = True) -> Message:
        """Returns a message as templates take it; the calls of a reply of ours as they were said."""
        plain: Any = {key: value for key, value in message.items() if key in _READ and value is not None}
        plain.setdefault("content", "")
        if plain["role"] == "developer":
            plain["role"] = "system"
        elif plain["role"] == "tool" and (called := self._calls.get(key := str(plain.get("tool_call_id")))):
            names = {call["id"]: call["function"]["name"] for call in called[-1].message["tool_calls"]}
            plain.setdefault("name", names[key])
        if plain["role"] != "assistant":
            return cast(Message, plain)
        ids = [call.get("id") for call in plain.get("tool_calls", ()) if as_said]
        for own in self._calls.get(ids[0], ()) if ids else ():  # models give ids too, and not always new ones
            raw = self.form.raw_content(own.reply)
            if raw is not None and echo_of(own.message, own.reply, message):
                return Message(role="assistant", content=raw)
        return self.form.written(cast(Message, plain))


def _of_two(messages: list[Message]) -> list[Message]:
    """Returns messages that, but for the first, are the assistant's and one user's, by turns."""
    return joined([*messages[:1], *told_by_user(messages[1:])])
