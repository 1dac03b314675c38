"""ChatRenderer: messages to ids, sampled ids to a Reply.

One rule above all: what the policy sampled is never decoded and encoded again. The ids of the next prompt
are the ids so far, the sampled ids, and a *bridge*: the end of the turn if it was not sampled, the new
messages, and the header after which the assistant speaks. Prompt and bridge are never trained; exactly the
sampled ids are.
"""

from __future__ import annotations

import datetime
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from atropos_gym.errors import ConfigError, NewSegment, TemplateError
from atropos_gym.messages import Reply, ToolCall
from atropos_gym.rendering.bytes_dialect import BytesDialect
from atropos_gym.rendering.clock import on_day
from atropos_gym.rendering.dialect import Dialect
from atropos_gym.rendering.reply_text import split_channels, split_thinking
from atropos_gym.rendering.said import (
    checked_ids,
    checked_messages,
    checked_text,
    images_of,
)
from atropos_gym.rendering.transcript import Source, row_pieces, said_pieces, sources_of
from atropos_gym.tokenizers import BytesTokenizer, Tokenizer, digest, load_tokenizer

if TYPE_CHECKING:
    from atropos_gym.rendering.report import ModelReport

__all__ = ["ChatRenderer", "Past", "Source", "chat_renderer"]

Past = Literal["append", "template"]


class ChatRenderer:
    """Writes conversations as ids, continues them, and reads sampled ids.

    Deep-copies to itself and pickles as its arguments.

    Args:
        tokenizer: a name, a folder, a transformers tokenizer or one of ours.
        template: a Jinja chat template in place of the tokenizer's own.
        template_kwargs: further variables of the template, fixed for the renderer's life.
        stop_ids: ids that end a turn; None finds them (generation config, eos, the template's close).
        past: ``"append"`` leaves sampled ids as they are for the whole episode; ``"template"`` renders the
            whole conversation at every turn and opens a new segment where that changed what stood before.
        system: ``"auto"`` uses the system role where the template takes it, else puts the text before the
            first user message; ``"role"`` refuses the latter, ``"merge"`` forces it.
        tool_role: ``"auto"`` uses the tool role where the template keeps it, else a user message;
            ``"tool"`` refuses the latter, ``"user"`` forces it.

    Raises:
        TemplateError: the template has no end of turn, ignores the generation prompt, or drops a role.
        ConfigError: a setting with an unknown value.

    Example:
        >>> renderer = ChatRenderer("bytes")
        >>> renderer.prompt([{"role": "user", "content": "hi"}])
        [257, 260, 104, 105, 261]
        >>> renderer.reply([111, 107, 258]).content
        'ok'
        >>> renderer.bridge([111, 107, 258], [{"role": "user", "content": "1"}])
        [260, 49, 261]
    """

    def __init__(
        self,
        tokenizer: str | Tokenizer | Any = "bytes",
        *,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Sequence[int] | None = None,
        past: Past = "append",
        system: Literal["auto", "role", "merge"] = "auto",
        tool_role: Literal["auto", "tool", "user"] = "auto",
    ) -> None:
        _one_of("past", past, ("append", "template"))
        _one_of("system", system, ("auto", "role", "merge"))
        _one_of("tool_role", tool_role, ("auto", "tool", "user"))
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer)
        # Where nobody knows the model's rows, an id beyond the tokenizer may be one of them.
        self._rows = self.tokenizer.rows if getattr(self.tokenizer, "rows_known", True) else 2**31
        if stop_ids is not None:
            stop_ids = _checked_stop_ids(stop_ids, self._rows)
        self._arguments: dict[str, Any] = {
            "template": template,
            "template_kwargs": _checked_kwargs(template_kwargs),
            "stop_ids": stop_ids,
            "past": past,
            "system": system,
            "tool_role": tool_role,
        }
        self._dialect = self._make_dialect()
        self.past: Past = past
        if self._dialect.rewrites_history and past == "append":
            warnings.warn(
                f"the chat template of {self.tokenizer.name} writes a turn differently as the conversation "
                "grows: every turn becomes a segment of its own (past='template')",
                stacklevel=2,
            )
            self.past = "template"
        self.stop_ids: tuple[int, ...] = self._dialect.stop_ids
        self.opener: str = self._dialect.opener
        self.min_bridge: int = self._dialect.min_bridge
        self.think_tags: tuple[str, str] = (self._dialect.tags.opening, self._dialect.tags.closing)
        self.tool_dialect: str | None = self._dialect.tool_dialect
        self.channels: bool = self._dialect.channels
        self._stops = frozenset(self.stop_ids)

    def _make_dialect(self) -> Dialect:
        """Returns the way this tokenizer's conversations are written."""
        arguments = self._arguments
        if isinstance(self.tokenizer, BytesTokenizer):
            for name in ("template", "template_kwargs", "stop_ids"):
                if arguments[name]:
                    raise ConfigError(f"{name}= has no meaning for the bytes tokenizer: leave it out")
            return BytesDialect()
        from atropos_gym.tokenizers.hf import HFTokenizer

        if not isinstance(self.tokenizer, HFTokenizer):
            raise ConfigError(
                f"tokenizer {self.tokenizer.name!r} ({type(self.tokenizer).__name__}) has no chat template: "
                "use 'bytes' or a Hugging Face tokenizer"
            )
        from atropos_gym.rendering.template_dialect import TemplateDialect

        return TemplateDialect(self.tokenizer, **{k: v for k, v in arguments.items() if k != "past"})

    @property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt opens a think block that the policy only closes."""
        return bool(self.opener)

    def reads(self, name: str) -> bool:
        """Returns whether the template reads a variable of ``template_kwargs``, such as ``enable_thinking``.

        Example:
            >>> ChatRenderer("bytes").reads("enable_thinking")
            False
        """
        return self._dialect.reads(name)

    @property
    def fingerprint(self) -> str:
        """``sha256:...`` of the tokenizer and of everything else that decides the ids."""
        return digest({"tokenizer": self.tokenizer.fingerprint, **self._dialect.identity})

    def report(self) -> ModelReport:
        """Returns what was found about this tokenizer and template, with every promise really tried.

        Example:
            >>> ChatRenderer("bytes").report().ok
            True
        """
        from atropos_gym.rendering.report import report

        return report(self, self._dialect)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Returns the ids of a conversation, ending where the assistant is to speak.

        Args:
            messages: mappings with ``role`` and ``content`` (a str, or parts where the template takes them).
            tools: schemas of tools, or functions; fixed for the segment.

        Raises:
            TypeError: no messages at all, but something else.
            TemplateError: no message, the last one is the assistant's, or the template refuses them.
        """
        return self._dialect.prompt(messages, tools)

    def bridge(
        self, turn_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> list[int]:
        """Returns all that stands between the sampled ``turn_ids`` and the next turn.

        It depends on the turn through its last id alone: a stop id or not.

        Args:
            turn_ids: what was sampled, the end id included where it was.
            messages: what is said to the policy now.
            tools: those of the prompt.

        Raises:
            NewSegment: the ids so far cannot be extended by these messages.
            TypeError: no ids or no messages, but something else.
            TemplateError: no message, an assistant's among them, or the template refuses them.
        """
        if self.past == "template":
            raise NewSegment(
                f"past='template' ({self.tokenizer.name}): a turn is followed by a render of the whole "
                "conversation: use advance(), or prompt()"
            )
        last: int | None = None
        try:
            if len(turn_ids):
                last = turn_ids[-1]
                if type(last) is not int or not 0 <= last < self._rows:
                    last = checked_ids(turn_ids, self._rows)[-1]
        except TypeError:
            checked_ids(turn_ids, self._rows)  # says what is no sequence of ids
            raise
        return self._dialect.bridge(last, messages, tools)

    def advance(
        self,
        ids: Iterable[int],
        turn_ids: Sequence[int],
        conversation: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
    ) -> tuple[list[int], bool]:
        """Returns what follows a turn, and whether it opens a new segment.

        Args:
            ids: the prompt of the turn; any integers.
            turn_ids: what was sampled after it.
            conversation: the messages of the segment so far, the turn's own text last.
            messages: what is said now.
            tools: schemas of the tools, fixed for the segment.

        Returns:
            ``(bridge, False)``, or ``(new prompt, True)`` where the ids so far cannot be extended.

        Example:
            >>> said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            >>> ChatRenderer("bytes").advance([], [98, 258], said, [{"role": "user", "content": "c"}])
            ([260, 99, 261], False)
        """
        if self.past == "append":
            try:
                return self.bridge(turn_ids, messages, tools), False
            except NewSegment:
                return self.prompt([*conversation, *messages], tools), True
        prompt = self.prompt([*conversation, *messages], tools)
        so_far = [*map(int, ids), *turn_ids]
        if prompt[: len(so_far)] == so_far:
            return prompt[len(so_far) :], False
        return prompt, True

    def reply(self, turn_ids: Sequence[int]) -> Reply:
        """Returns what the policy said: its ids before the first stop id, decoded once, whole.

        Raises:
            TypeError: no sequence of integers.
            TemplateError: an id outside the model's rows.
        """
        ids = checked_ids(turn_ids, self._rows)
        end = min((ids.index(stop) for stop in self._stops if stop in ids), default=len(ids))
        text = self.tokenizer.decode(ids[:end])
        if self._dialect.channels:
            thinking, content, calls = split_channels(text)
        else:
            thinking, content = split_thinking(text, bool(self.opener), self._dialect.tags)
            calls = self._calls_in(content)
        return Reply(
            text=text,
            content=content,
            ids=ids,
            thinking=thinking,
            tool_calls=calls,
            complete=end < len(ids),
            malformed=end < len(ids) - 1,
            opened=self.opener,
        )

    def _calls_in(self, content: str) -> tuple[ToolCall, ...]:
        """Returns the calls of tools in a turn, where the family's form of them is known."""
        if self.tool_dialect is None or not content:
            return ()
        from atropos_gym.parsing import parse_tool_calls

        return tuple(parse_tool_calls(content, self.tool_dialect).calls)

    def unknown_ids(self, turn_ids: Sequence[int]) -> list[int]:
        """Returns the sampled ids that lie beyond the tokenizer, in order.

        A model may have more rows than its tokenizer has ids. Such an id has no text; it is trained on like
        any other, since it was sampled.

        Example:
            >>> from atropos_gym import load_tokenizer
            >>> ChatRenderer(load_tokenizer("bytes", rows=300)).unknown_ids([104, 299, 258])
            [299]
        """
        length = len(self.tokenizer)
        return [token for token in checked_ids(turn_ids, self._rows) if token >= length]

    def images(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Returns the images in messages, in order: one for each run of ``image_ids`` in their rendering.

        Ids hold one placeholder an image; an engine or a learner makes of it as many as the model wants.

        Example:
            >>> parts = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]
            >>> ChatRenderer("bytes").images([{"role": "user", "content": parts}])
            ['cat.png']
        """
        return images_of(checked_messages(messages))

    @property
    def image_ids(self) -> tuple[int, ...]:
        """What the template writes for one image; empty where it has no place for any."""
        return self._dialect.image_ids

    def say(self, text: str) -> list[int]:
        """Returns what a policy would have sampled for ``text``, the end id included.

        Raises:
            TypeError: no str.

        Example:
            >>> ChatRenderer("bytes").say("ok")
            [111, 107, 258]
        """
        return self._dialect.say(checked_text(text))

    def transcript(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> tuple[list[int], list[bool]]:
        """Returns the ids of a whole conversation and which of them a policy would have sampled.

        Every assistant message is what ``say`` gives; messages after the last one are written without a
        generation prompt.

        Returns:
            ids and mask, both of one length.

        Example:
            >>> ids, mask = ChatRenderer("bytes").transcript(
            ...     [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            ... )
            >>> ids, [i for i, sampled in zip(ids, mask) if sampled]
            ([257, 260, 97, 261, 98, 258], [98, 258])
        """
        pieces = said_pieces(self._dialect, checked_messages(messages), tools)
        ids = [token for piece in pieces for token in piece.ids]
        mask = [piece.sampled for piece in pieces for _ in piece.ids]
        return ids, mask

    def spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        turns: Sequence[Sequence[int]] | None = None,
    ) -> list[Source]:
        """Returns who put each id there: the template, a message, or the policy.

        Args:
            messages: a conversation.
            tools: those of its prompt.
            turns: the sampled ids of its assistant messages, in order (of the last ones, if there are fewer):
                then it speaks of the row that was played, prompt + turn + bridge + turn to the last sampled
                id; without, of ``transcript``.

        Raises:
            TemplateError: more turns than assistant messages.
            NewSegment: the turns were no single segment.

        Example:
            >>> talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            >>> ChatRenderer("bytes").spans(talk)
            ['template', 'template', 'message', 'template', 'policy', 'policy']
            >>> ChatRenderer("bytes").spans(talk, turns=[[98]])
            ['template', 'template', 'message', 'template', 'policy']
        """
        messages = checked_messages(messages)
        if turns is None:
            pieces = said_pieces(self._dialect, messages, tools)
        else:
            sampled = [checked_ids(turn, self._rows) for turn in turns]
            pieces = row_pieces(self._dialect, messages, sampled, tools, append=self.past == "append")
        return sources_of(self._dialect, pieces, tools)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChatRenderer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.tokenizer, self._arguments, self._dialect.identity.get("date"))

    def __repr__(self) -> str:
        return f"ChatRenderer({self.tokenizer.name!r}, past={self.past!r})"


def _rebuild(tokenizer: Tokenizer, arguments: Mapping[str, Any], day: str | None = None) -> ChatRenderer:
    """Unpickles a renderer from its arguments and the day that its template's clock shows."""
    with on_day(None if day is None else datetime.date.fromisoformat(day)):
        return ChatRenderer(tokenizer, **arguments)


_cache: dict[int, ChatRenderer] = {}


def chat_renderer(tokenizer: str | Tokenizer | Any = "bytes") -> ChatRenderer:
    """Returns the renderer with default settings, one object per tokenizer and process.

    Example:
        >>> chat_renderer("bytes") is chat_renderer("bytes")
        True
    """
    loaded = load_tokenizer(tokenizer)
    # The renderer keeps its tokenizer alive, so an id is never reused.
    if id(loaded) not in _cache:
        _cache[id(loaded)] = ChatRenderer(loaded)
    return _cache[id(loaded)]


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _checked_stop_ids(stop_ids: Any, rows: int) -> tuple[int, ...]:
    """Returns the ids that end a turn.

    Raises:
        ConfigError: no ids, or ids that the model does not have.
    """
    try:
        found = checked_ids(stop_ids, rows)
    except (TypeError, TemplateError) as error:
        raise ConfigError(f"stop_ids must be ids that end a turn: {error}") from None
    if not found:
        raise ConfigError("stop_ids is empty: a turn could not end; leave it out to find them")
    return found


def _checked_kwargs(kwargs: Any) -> dict[str, Any]:
    """Returns the variables of a template.

    Raises:
        ConfigError: no mapping, or a value that has no place in the fingerprint.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise ConfigError(f"template_kwargs must be a mapping, got {type(kwargs).__name__}")
    try:
        json.dumps(dict(kwargs))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"template_kwargs must be plain data ({error}): functions cannot be passed"
        ) from None
    return dict(kwargs)
