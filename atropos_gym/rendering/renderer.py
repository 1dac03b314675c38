"""ChatRenderer: messages to ids, sampled ids to a Reply.

One rule above all: what the policy sampled is never decoded and encoded again. The ids of the next prompt
are the ids so far, the sampled ids, and a *bridge*: the end of the turn if it was not sampled, the new
messages, and the header after which the assistant speaks. Prompt and bridge are never trained; exactly the
sampled ids are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from atropos_gym.errors import ConfigError, NewSegment, TemplateError
from atropos_gym.messages import Reply, ToolCall
from atropos_gym.rendering.bytes_dialect import BytesDialect
from atropos_gym.rendering.dialect import Dialect
from atropos_gym.rendering.reply_text import split_channels, split_thinking
from atropos_gym.tokenizers import BytesTokenizer, Tokenizer, digest, load_tokenizer

if TYPE_CHECKING:
    from atropos_gym.rendering.report import ModelReport

__all__ = ["ChatRenderer", "Past", "Source", "chat_renderer"]

Past = Literal["append", "template"]
#: Who put an id there: the template, a message's text, or the policy.
Source = Literal["template", "message", "policy"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a transcript: what the policy reads, or what it said."""

    ids: list[int]
    messages: list[Mapping[str, Any]]
    sampled: bool
    speak: bool = True


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
        self._arguments: dict[str, Any] = {
            "template": template,
            "template_kwargs": dict(template_kwargs or {}),
            "stop_ids": None if stop_ids is None else tuple(stop_ids),
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
        self._stops = frozenset(self.stop_ids)
        self._opens = "<think>" in self.opener

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
        return self._opens

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

        Raises:
            TemplateError: no messages, the last one is the assistant's, or the template refuses them.
        """
        if not messages:
            raise TemplateError("a prompt needs at least one message")
        if messages[-1].get("role") == "assistant":
            raise TemplateError("the last message of a prompt is the assistant's: nobody is to answer it")
        return self._dialect.prompt(messages, tools)

    def bridge(
        self, turn_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> list[int]:
        """Returns all that stands between the sampled ``turn_ids`` and the next turn.

        It depends on the turn through its last id alone: a stop id or not.

        Raises:
            NewSegment: the ids so far cannot be extended by these messages.
            TemplateError: no messages, an assistant's among them, or the template refuses them.
        """
        if not messages:
            raise TemplateError("a bridge needs at least one message")
        for message in messages:
            if message.get("role") == "assistant":
                raise TemplateError("a bridge holds no assistant message: the policy speaks by sampling")
        return self._dialect.bridge(int(turn_ids[-1]) if len(turn_ids) else None, messages, tools)

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
        """Returns what the policy said: its ids before the first stop id, decoded once, whole."""
        ids = tuple(turn_ids)
        end = len(ids)
        for position, token in enumerate(ids):
            if token in self._stops:
                end = position
                break
        text = self.tokenizer.decode(ids[:end])
        calls: tuple[ToolCall, ...] = ()
        if self._dialect.channels:
            thinking, content, calls = split_channels(text)
        else:
            thinking, content = split_thinking(text, self._opens)
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

    def say(self, text: str) -> list[int]:
        """Returns what a policy would have sampled for ``text``, the end id included.

        Example:
            >>> ChatRenderer("bytes").say("ok")
            [111, 107, 258]
        """
        return self._dialect.say(text)

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
        ids: list[int] = []
        mask: list[bool] = []
        for piece in self._pieces(messages, tools):
            ids += piece.ids
            mask += [piece.sampled] * len(piece.ids)
        return ids, mask

    def spans(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[Source]:
        """Returns who put each id of ``transcript`` there: the template, a message, or the policy.

        An id that holds text of both template and message is the message's.

        Example:
            >>> ChatRenderer("bytes").spans(
            ...     [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            ... )
            ['template', 'template', 'message', 'template', 'policy', 'policy']
        """
        sources: list[Source] = []
        for piece in self._pieces(messages, tools):
            if piece.sampled:
                sources += ["policy"] * len(piece.ids)
                continue
            said = self._dialect.said(
                piece.messages, tools, first=not sources, speak=piece.speak, size=len(piece.ids)
            )
            sources += ["message" if one else "template" for one in said]
        return sources

    def _pieces(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[_Piece]:
        """Returns a conversation in turns: context, what the policy said, context, ..."""
        pieces: list[_Piece] = []
        waiting: list[Mapping[str, Any]] = []
        last: int | None = None
        for message in messages:
            if message.get("role") != "assistant":
                waiting.append(message)
                continue
            if not waiting:
                raise TemplateError("every assistant message of a transcript must answer another message")
            pieces.append(self._context(waiting, last, bool(pieces), tools, speak=True))
            said = self.say(message["content"])
            pieces.append(_Piece(said, [message], sampled=True))
            last = said[-1]
            waiting = []
        if waiting:
            pieces.append(self._context(waiting, last, bool(pieces), tools, speak=False))
        return pieces

    def _context(
        self, messages: list[Mapping[str, Any]], last: int | None, later: bool, tools: Any, *, speak: bool
    ) -> _Piece:
        """Returns a piece that the policy reads: a bridge (``later``) or the first prompt."""
        if later:
            ids = self._dialect.bridge(last, messages, tools, speak=speak)
        else:
            ids = self._dialect.prompt(messages, tools, speak=speak)
        return _Piece(ids, messages, sampled=False, speak=speak)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChatRenderer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.tokenizer, self._arguments)

    def __repr__(self) -> str:
        return f"ChatRenderer({self.tokenizer.name!r}, past={self.past!r})"


def _rebuild(tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> ChatRenderer:
    """Unpickles a renderer from its arguments."""
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
