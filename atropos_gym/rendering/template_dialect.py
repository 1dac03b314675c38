"""How a Hugging Face tokenizer with a chat template writes and continues conversations.

What a template does is probed once (``template_probe``). A bridge is the text behind a dummy answer,
encoded in one call: pasting stored pieces would lose what templates do to a message (trim, quote, wrap,
merge) and to its neighbours (newlines that become one id).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from atropos_gym.errors import NewSegment, TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate
from atropos_gym.rendering.probes import (
    ANSWERED,
    ASSISTANT_PROBE,
    THOUGHT_ANSWERED,
    USER_PROBE,
    call_messages,
)
from atropos_gym.rendering.role_form import RoleForm
from atropos_gym.rendering.said import checked_tools, heard_messages, opening_messages
from atropos_gym.rendering.spans import message_places, overlaps
from atropos_gym.rendering.template_facts import template_facts
from atropos_gym.rendering.template_messages import TemplateMessages
from atropos_gym.rendering.template_probe import probe, stop_ids_of
from atropos_gym.rendering.template_reading import (
    opened_tag,
    speaks_in_channels,
    think_tags,
    tool_dialect,
)
from atropos_gym.tokenizers.control_text import ControlText, well_formed
from atropos_gym.tokenizers.hf import HFTokenizer
from atropos_gym.tokenizers.plain_encoding import PlainEncoder

__all__ = ["TemplateDialect"]

_CACHE_SIZE = 4096
_CACHED_TEXT = 512

_Messages = Sequence[Mapping[str, Any]]


class TemplateDialect:
    """Writes and continues conversations for one tokenizer and template; see ``dialect.Dialect``.

    Args:
        tokenizer: the tokenizer.
        template: Jinja source in place of its own.
        template_kwargs: further variables of the template.
        stop_ids: ids that end a turn; None finds them.
        system: ``"auto"``, ``"role"`` or ``"merge"``.
        tool_role: ``"auto"``, ``"tool"`` or ``"user"``.

    Raises:
        TemplateError: the template cannot be used so; the message says why.
    """

    def __init__(
        self,
        tokenizer: HFTokenizer,
        template: str | None,
        template_kwargs: Mapping[str, Any],
        stop_ids: Sequence[int] | None,
        system: Literal["auto", "role", "merge"],
        tool_role: Literal["auto", "tool", "user"],
    ) -> None:
        self.name = tokenizer.name
        self._template = ChatTemplate(tokenizer, template, template_kwargs)
        added = tokenizer.backend.get_added_tokens_decoder()
        known = _control_ids(tokenizer, added, self._template.literals)
        encode = ControlText(tokenizer.backend, known).encode
        if stop_ids is None:
            stop_ids = stop_ids_of(self._template, encode, known, tokenizer.eos_ids)
        self.stop_ids: tuple[int, ...] = tuple(map(int, stop_ids))
        self._stops = frozenset(self.stop_ids)
        controls = known | (self._stops & added.keys())
        self.controls: Mapping[int, str] = {i: added[i].content for i in sorted(controls)}
        self._text = ControlText(tokenizer.backend, controls)
        self._probed = probe(self._template, self._text.encode, controls, self.stop_ids)
        self._forms = self._probed.forms
        self._header = self._assistant_header()
        self.tags = think_tags(self._template, self._probed.head, (t.content for t in added.values()))
        self.opener = opened_tag(self._probed.opening, self.tags)
        self.channels = speaks_in_channels(self._template.literals)
        self.tool_dialect = None if self.channels else tool_dialect(self._template.literals)
        self._sayable = PlainEncoder(tokenizer.backend, self._unsayable(tokenizer, controls))
        tool_as_user = self._choose_tool_role(tool_role)
        used = [form for role, form in self._forms.items() if role == "user" or not tool_as_user]
        self._prepare = TemplateMessages(
            self._template,
            self._text,
            tool_as_user=tool_as_user,
            merge_system=self._choose_system(system, used),
        )
        self.rewrites_history = not all(
            form.independent and (form.independent_of_system or self._prepare.merge_system) for form in used
        )
        self._answer = self._text.encode(ASSISTANT_PROBE)
        self._cache: dict[Any, list[int]] = {}
        self.min_bridge = self._shortest_bridge()

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides the ids beside the tokenizer; part of the fingerprint."""
        return {
            "kind": "template",
            **self._template.identity,
            "stop_ids": sorted(self.stop_ids),
            "merge_system": self._prepare.merge_system,
            "tool_as_user": self._prepare.tool_as_user,
        }

    def facts(self) -> dict[str, Any]:
        """Returns what the template does to a conversation."""
        return template_facts(self._template, self._probed, self._text.encode, self.controls, self.tags)

    def reads(self, name: str) -> bool:
        """Returns whether the template reads a variable."""
        return self._template.reads(name)

    @cached_property
    def image_ids(self) -> tuple[int, ...]:
        """What the template writes for one image; empty where it has no place for any."""
        return tuple(self._text.encode(self._template.image))

    # --- choices at construction ---

    def _assistant_header(self) -> list[int]:
        """Returns the ids of the generation prompt."""
        if self._probed.generation_prompt is not None:
            return self._text.encode(self._probed.generation_prompt)
        opening = self._text.encode(self._probed.opening)  # the user's close, then the header
        close = next((i + 1 for i, token in enumerate(opening) if token in self._stops), 0)
        return opening[close:]

    def _unsayable(self, tokenizer: HFTokenizer, controls: frozenset[int]) -> frozenset[int]:
        """Returns the control ids that no turn of the assistant holds: ends, headers, special tokens.

        Think and tool tags can be said; so can what the template itself writes inside a turn.
        """
        head = self._probed.head
        sayable = set(self._text.encode(self.tags.opening + self.tags.closing))
        for turn in (ANSWERED, THOUGHT_ANSWERED):
            text = self._template.render(turn, False) if self._takes(turn) else ""
            if text.startswith(head):
                sayable |= set(self._text.encode(text[len(head) :].partition(ASSISTANT_PROBE)[0]))
        outside = {*self._text.encode(head), *tokenizer.special_ids}
        return self._stops & controls | (controls & outside - sayable)

    def _takes(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Returns whether the template writes these messages."""
        try:
            self._template.render(messages, False)
        except TemplateError:
            return False
        return True

    def _choose_system(self, wanted: Literal["auto", "role", "merge"], used: Sequence[RoleForm]) -> bool:
        """Returns whether system text goes in front of the first user message."""
        if wanted != "auto":
            if wanted == "role" and not self._probed.takes_system:
                raise TemplateError(
                    f"the chat template of {self.name} takes no message of role 'system': set system='auto' "
                    "or 'merge'"
                )
            return wanted == "merge"
        return not (self._probed.takes_system and all(form.independent_of_system for form in used))

    def _choose_tool_role(self, wanted: Literal["auto", "tool", "user"]) -> bool:
        """Returns whether tool messages are written as user messages."""
        refused = self._probed.refused.get("tool")
        if wanted == "tool" and refused is not None:
            raise TemplateError(
                f"the chat template of {self.name} cannot write role 'tool' ({refused}): set tool_role='user'"
            )
        return wanted == "user" or refused is not None

    def _shortest_bridge(self) -> int:
        """Returns the length of the bridge of an empty user message after an empty turn."""
        try:
            return len(self.bridge(None, [{"role": "user", "content": ""}]))
        except TemplateError:  # some templates want words
            words = self._text.encode(USER_PROBE)
            return len(self.bridge(None, [{"role": "user", "content": USER_PROBE}])) - len(words)

    # --- ids ---

    def prompt(self, messages: _Messages, tools: Any = None, *, speak: bool = True) -> list[int]:
        """Returns the ids of a whole conversation, encoded once."""
        messages, tools = opening_messages(messages), checked_tools(tools)
        key = _key("prompt", None, messages, tools, speak)
        if key is not None and (known := self._cache.get(key)) is not None:
            return list(known)  # looked up once: another thread may empty the cache
        ids = self._text.encode(self._prompt_text(self._prepare(messages), self._text.mark(tools)))
        return self._keep(key, self._without_header(ids, speak))

    def bridge(
        self, last: int | None, messages: _Messages, tools: Any = None, *, speak: bool = True
    ) -> list[int]:
        """Returns the ids between a turn that ended with ``last`` and the next turn.

        Raises:
            NewSegment: ``last`` is the header of another role than the next message.
        """
        messages, tools = heard_messages(messages), checked_tools(tools)
        end = last if last in self._stops else None
        key = _key("bridge", end, messages, tools, speak)
        if key is not None and (known := self._cache.get(key)) is not None:
            return list(known)  # looked up once: another thread may empty the cache
        prepared = self._prepare(messages)
        form = self._form(prepared)
        rest = self._bridge_text(prepared, form, self._text.mark(tools))
        if form.anchored:
            ids = self._text.encode(ASSISTANT_PROBE + rest)[len(self._answer) :]
        else:
            ids = self._text.encode(rest)
        return self._keep(key, self._without_header(self._continued(ids, end, form), speak))

    def say(self, text: str, before: str | None = None) -> list[int]:
        """Returns the ids of ``text`` and what closes a turn, in front of a message of role ``before``."""
        form = self._form_of(before or "user")
        by_role = form.kind in ("header", "tool_call")
        ending = [form.close] if before is not None and by_role else self._probed.ending
        return [*self._sayable.encode(well_formed(text), at_start=False), *ending]

    def said(
        self, messages: _Messages, tools: Any = None, *, first: bool, speak: bool, size: int
    ) -> list[bool]:
        """Returns for each id of a prompt (``first``) or bridge whether a message's text put it there.

        A bridge of ``size`` ids may stand without the end of the turn before it.
        """
        prepared, marked = self._prepare(messages), self._text.mark(checked_tools(tools))
        render: Callable[[Any], str]
        if first:
            render = partial(self._prompt_text, tools=marked)
        else:
            form = self._form(prepared)
            lead = ASSISTANT_PROBE if form.anchored else ""

            def render(said: Any) -> str:
                return lead + self._bridge_text(said, form, marked)

        text = render(prepared)
        encoded = self._text.encode_with_ends(text)
        places = self._text.unmarked_places(text, message_places(text, prepared, render))
        labels = overlaps(encoded.ends, places)
        labels = labels[: len(self._without_header(encoded.ids, speak))]
        # A bridge may lack the end of a turn that stands in the text, or have one that does not.
        return [False] * (size - len(labels)) + labels[max(0, len(labels) - size) :]

    # --- texts ---

    def _render(self, messages: Sequence[dict[str, Any]], speak: bool, tools: Any) -> str:
        return self._text.unescape(self._template.render(messages, speak, tools))

    def _prompt_text(self, prepared: Sequence[dict[str, Any]], tools: Any) -> str:
        return self._render(prepared, True, tools)

    def _form(self, prepared: Sequence[dict[str, Any]]) -> RoleForm:
        """Returns how the first of the messages follows a turn."""
        return self._form_of(str(prepared[0]["role"]))

    def _form_of(self, role: str) -> RoleForm:
        """Returns how a message of a role follows a turn."""
        if role == "tool" and self._prepare.tool_as_user:
            role = "user"
        return self._forms.get(role, self._forms["user"])

    def _bridge_text(self, prepared: Sequence[dict[str, Any]], form: RoleForm, tools: Any) -> str:
        """Returns the text behind a turn (behind its close, after a tool call)."""
        tools = tools if form.takes_tools else None
        if form.kind == "tool_call":
            history = call_messages([str(m.get("name", "tool")) for m in prepared if m["role"] == "tool"])
            before = self._render(history, False, tools)
            text = self._render([*history, *prepared], True, tools)
            if not text.startswith(before):
                raise NewSegment(f"the chat template of {self.name} rewrites a tool call before its result")
            return text[len(before) :]
        text = self._render([*ANSWERED, *prepared], True, tools)
        # Tool schemas may stand in front of the dummy turn, and hold any word.
        _, found, rest = text[max(text.find(USER_PROBE), 0) :].partition(ASSISTANT_PROBE)
        moved = next((m for m in prepared if m["role"] in ("system", "developer") and m["content"]), None)
        if not found or (moved is not None and _first_words(moved) not in rest):
            role = "assistant" if moved is None else moved["role"]
            raise TemplateError(
                f"the chat template of {self.name} moves or drops the text of role {role!r} before a "
                f"{prepared[-1]['role']} message: say it in a user message"
            )
        return rest

    def _continued(self, ids: list[int], end: int | None, form: RoleForm) -> list[int]:
        """Returns the ids of a bridge after a turn that sampled its end ``end``, or None."""
        if form.kind == "tool_call":
            return [form.close, *ids] if end is None else ids
        if end is None:
            return ids
        if form.kind == "header":
            if not ids or ids[0] != end:
                raise NewSegment(
                    f"the turn ended with id {end} ({self.controls.get(end, 'no control token')!r}), but the "
                    f"next message has the header {ids[:1]} ({self.name})"
                )
            return ids[1:]
        token = end if end in form.skips else form.close
        place = form.skips.get(token, 0)
        if ids[place - 1 : place] != [token]:  # what is said changes what stands before it
            place = ids.index(token) + 1
        return ids[place:]

    def _without_header(self, ids: list[int], speak: bool) -> list[int]:
        """Returns the ids without the generation prompt where nobody is to speak."""
        header = self._header
        if speak or not header or ids[-len(header) :] != header:
            return ids
        return ids[: -len(header)]

    def _keep(self, key: Any, ids: list[int]) -> list[int]:
        """Remembers ids of a few short messages: the same states and words come again and again."""
        if key is not None:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[key] = list(ids)
        return ids


def _control_ids(tokenizer: HFTokenizer, added: Mapping[int, Any], literals: str) -> frozenset[int]:
    """Returns the added tokens that text must never become: special, written by the template, or listed."""
    listed = frozenset(getattr(tokenizer.hf, "chat_control_tokens", None) or ())
    written = {
        i for i, t in added.items() if t.content in listed or (t.content.strip() and t.content in literals)
    }
    return tokenizer.special_ids | written


def _first_words(message: Mapping[str, Any]) -> str:
    """Returns the beginning of a message's text, as templates that trim leave it."""
    content = message["content"]
    text = content if isinstance(content, str) else next((p["text"] for p in content if "text" in p), "")
    return str(text).strip()[:40].strip()


def _key(kind: str, end: int | None, messages: _Messages, tools: Any, speak: bool) -> Any:
    """Returns what decides the ids of a few short messages, or None for others: they hardly come again."""
    if tools or len(messages) > 4:
        return None
    said = tuple(tuple(message.items()) for message in messages)
    size = 0
    for message in said:
        for _, value in message:
            if not isinstance(value, str):
                return None
            size += len(value)
    return (kind, end, said, speak) if size < _CACHED_TEXT else None
