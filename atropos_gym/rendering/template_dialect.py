"""How a Hugging Face tokenizer with a chat template writes and continues conversations.

What a template does is probed once (``_template_probe``). A bridge is the text behind a dummy answer,
encoded in one call: pasting stored pieces would lose what templates do to a message (trim, quote, wrap,
merge) and to its neighbours (newlines that become one id).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from atropos_gym.errors import NewSegment, TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate
from atropos_gym.rendering.template_facts import template_facts
from atropos_gym.rendering.template_probe import (
    ASSISTANT_PROBE,
    USER_PROBE,
    RoleForm,
    call_messages,
    probe,
    stop_ids_of,
)
from atropos_gym.tokenizers.hf import HFTokenizer
from atropos_gym.tokenizers.control_text import ControlText
from atropos_gym.tokenizers.plain_encoding import PlainEncoder

__all__ = ["TemplateDialect"]

#: What environments, tools and strangers wrote; system and assistant text is the author's or the policy's.
_UNTRUSTED = frozenset({"user", "tool"})
_CACHE_SIZE = 4096

_Messages = Sequence[Mapping[str, Any]]


class TemplateDialect:
    """Writes and continues conversations for one tokenizer and template; see ``_dialect.Dialect``.

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
        self._template = ChatTemplate(tokenizer.hf, tokenizer.name, template, template_kwargs)
        added = tokenizer.backend.get_added_tokens_decoder()
        literals = self._template.literals
        written = {i for i, t in added.items() if t.content.strip() and t.content in literals}
        listed = {
            i
            for i, t in added.items()
            if t.content in (getattr(tokenizer.hf, "chat_control_tokens", None) or ())
        }
        known = tokenizer.special_ids | written | listed
        encode = ControlText(tokenizer.backend, frozenset(known)).encode
        if stop_ids is None:
            stop_ids = stop_ids_of(self._template, encode, frozenset(known), tokenizer.eos_ids)
        self.stop_ids: tuple[int, ...] = tuple(map(int, stop_ids))
        self._stops = frozenset(self.stop_ids)
        controls = frozenset(known | (self._stops & added.keys()))
        self._text = ControlText(tokenizer.backend, controls)
        self._probed = probe(self._template, self._text.encode, controls, self.stop_ids)
        self._header = self._assistant_header()
        self._sayable = PlainEncoder(tokenizer.backend, self._unsayable(tokenizer, controls))
        self.controls: Mapping[int, str] = {i: added[i].content for i in sorted(controls)}
        self._merge_system = self._choose_system(system)
        self._tool_as_user = self._choose_tool_role(tool_role)
        used = [f for r, f in self._probed.forms.items() if r == "user" or not self._tool_as_user]
        self.rewrites_history = not all(
            form.independent and (form.independent_of_system or self._merge_system) for form in used
        )
        opening = self._probed.opening
        opened = "<think>" in opening and "</think>" not in opening.rpartition("<think>")[2]
        self.opener = "<think>" if opened else ""
        self.channels = "<|channel|>" in literals
        self.identity: Mapping[str, Any] = {
            "kind": "template",
            **self._template.identity,
            "stop_ids": sorted(self.stop_ids),
            "merge_system": self._merge_system,
            "tool_as_user": self._tool_as_user,
        }
        self._cache: dict[Any, list[int]] = {}
        self._warned: set[str] = set()
        self.min_bridge = len(self.bridge(None, [{"role": "user", "content": ""}]))

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
        asked = {"role": "user", "content": USER_PROBE}
        head = self._template.render([asked], True)
        turn = self._template.render([asked, {"role": "assistant", "content": ASSISTANT_PROBE}], False)
        inside = turn[len(head) :].partition(ASSISTANT_PROBE)[0] if turn.startswith(head) else ""
        opened = self._probed.opening.partition("<think>")
        sayable = set(self._text.encode(inside)) | set(self._text.encode(opened[1] + opened[2]))
        outside = set(self._text.encode(head)) | tokenizer.special_ids
        return self._stops & controls | (controls & outside - sayable)

    def _choose_system(self, wanted: Literal["auto", "role", "merge"]) -> bool:
        """Returns whether system text goes in front of the first user message."""
        if wanted != "auto":
            if wanted == "role" and not self._probed.takes_system:
                raise TemplateError(
                    f"the chat template of {self.name} takes no system message: set system='auto' or 'merge'"
                )
            return wanted == "merge"
        return not (self._probed.takes_system and self._probed.forms["user"].independent_of_system)

    def _choose_tool_role(self, wanted: Literal["auto", "tool", "user"]) -> bool:
        """Returns whether tool messages are written as user messages."""
        refused = self._probed.refused.get("tool")
        if wanted == "tool" and refused is not None:
            raise TemplateError(
                f"the chat template of {self.name} cannot write role 'tool' ({refused}): set tool_role='user'"
            )
        return wanted == "user" or refused is not None

    def facts(self) -> dict[str, Any]:
        """Returns what the template does to a conversation."""
        return template_facts(self._template, self._probed, self._text.encode, self.controls)

    def prompt(self, messages: _Messages, tools: Any = None, *, speak: bool = True) -> list[int]:
        """Returns the ids of a whole conversation, encoded once."""
        key = self._key("prompt", None, messages, tools, speak)
        if key is not None and key in self._cache:
            return list(self._cache[key])
        ids = self._text.encode(self._prompt_text(messages, tools))
        return self._keep(key, self._without_header(ids, speak))

    def bridge(
        self, last: int | None, messages: _Messages, tools: Any = None, *, speak: bool = True
    ) -> list[int]:
        """Returns the ids between a turn that ended with ``last`` and the next turn.

        Raises:
            NewSegment: ``last`` is the header of another role than the next message.
        """
        end = last if last in self._stops else None
        key = self._key("bridge", end, messages, tools, speak)
        if key is not None and key in self._cache:
            return list(self._cache[key])
        text, form = self._bridge_text(messages, tools)
        ids = self._continued(self._text.encode(text), end, form)
        return self._keep(key, self._without_header(ids, speak))

    def say(self, text: str) -> list[int]:
        """Returns the ids of ``text`` and what closes a turn."""
        return [*self._sayable.encode(text), *self._probed.ending]

    def said(
        self, messages: _Messages, tools: Any = None, *, first: bool, speak: bool, size: int
    ) -> list[bool]:
        """Returns for each id of a prompt (``first``) or bridge whether a message's text put it there.

        A bridge of ``size`` ids may stand without the end of the turn before it.
        """
        text = self._prompt_text(messages, tools) if first else self._bridge_text(messages, tools)[0]
        encoded = self._text.encode_with_ends(text)
        plain = self._text.unmark(text)
        places = _places(plain, [m["content"] for m in messages if isinstance(m.get("content"), str)])
        labels: list[bool] = []
        begin = last = 0
        for end in encoded.ends:
            if end > last:  # several ids of one character or word end at one place
                begin, last = last, end
            labels.append(any(begin < b and end > a for a, b in places))
        shown = len(self._without_header(encoded.ids, speak))
        return labels[:shown][-size:]

    # --- texts ---

    def _prompt_text(self, messages: _Messages, tools: Any) -> str:
        return self._template.render(self._prepared(messages), True, self._text.mark(tools))

    def _bridge_text(self, messages: _Messages, tools: Any) -> tuple[str, RoleForm]:
        """Returns the text behind a turn (behind its close, after a tool call), and how it is closed."""
        prepared = self._prepared(messages)
        role = str(prepared[0]["role"])
        form = self._probed.forms.get(role, self._probed.forms["user"])
        tools = self._text.mark(tools)
        if form.kind == "tool_call":
            names = [str(m.get("name", "tool")) for m in prepared if m["role"] == "tool"]
            history = call_messages(names)
            before = self._template.render(history, False, tools)
            text = self._template.render([*history, *prepared], True, tools)
            if not text.startswith(before):
                raise NewSegment(f"the chat template of {self.name} rewrites a tool call before its result")
            return text[len(before) :], form

        history = [
            {"role": "user", "content": USER_PROBE},
            {"role": "assistant", "content": ASSISTANT_PROBE},
        ]
        text = self._template.render([*history, *prepared], True, tools)
        _, found, rest = text.partition(ASSISTANT_PROBE)
        if not found:
            raise TemplateError(f"the chat template of {self.name} drops a turn before a {role} message")
        return rest, form

    def _continued(self, ids: list[int], end: int | None, form: RoleForm) -> list[int]:
        """Returns the ids of a bridge after a turn that sampled its end ``end``, or None."""
        if form.kind == "tool_call":
            return [form.close, *ids] if end is None else ids
        if end is None:
            return ids
        if form.kind == "header":
            if ids[0] != end:
                raise NewSegment(
                    f"the turn ended with id {end}, but the next message has the header {ids[0]}"
                )
            return ids[1:]
        return ids[ids.index(form.close) + 1 :]

    def _without_header(self, ids: list[int], speak: bool) -> list[int]:
        """Returns the ids without the generation prompt where nobody is to speak."""
        header = self._header
        if speak or not header or ids[-len(header) :] != header:
            return ids
        return ids[: -len(header)]

    # --- messages ---

    def _prepared(self, messages: _Messages) -> list[dict[str, Any]]:
        """Returns messages as the template takes them, control spellings of strangers marked."""
        prepared = [self._marked(message) for message in messages]
        if self._tool_as_user:
            for message in prepared:
                if message["role"] == "tool":
                    self._warn_once("tool", "has no tool role: tool messages are written as user messages")
                    message["role"] = "user"
        if self._merge_system and prepared and prepared[0]["role"] == "system":
            self._warn_once(
                "system", "takes no system message here: its text goes before the first user message"
            )
            prepared = _merged(prepared, self.name)
        return prepared

    def _marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if "role" not in message or "content" not in message:
            raise TemplateError(f"a message needs role and content, got {dict(message)!r:.80}")
        if message["role"] not in _UNTRUSTED:
            return dict(message)
        return {key: value if key == "role" else self._text.mark(value) for key, value in message.items()}

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"the chat template of {self.name} {text}", stacklevel=2)

    # --- cache ---

    def _key(self, kind: str, end: int | None, messages: _Messages, tools: Any, speak: bool) -> Any:
        """Returns what decides the ids, or None where it cannot be hashed."""
        if tools:
            return None
        said = tuple(tuple(message.items()) for message in messages)
        if not all(isinstance(value, str) for message in said for _, value in message):
            return None
        return kind, end, said, speak

    def _keep(self, key: Any, ids: list[int]) -> list[int]:
        """Remembers ids of a few short messages: the same states and words come again and again."""
        if key is not None and len(ids) < 1024:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[key] = list(ids)
        return ids


def _merged(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns messages whose leading system text stands in front of the first user message."""
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if count == len(messages) or messages[count]["role"] != "user":
        raise TemplateError(f"system text needs a user message behind it to go into ({name})")
    system = "\n\n".join(str(m["content"]) for m in messages[:count])
    first = {**messages[count], "content": f"{system}\n\n{messages[count]['content']}"}
    return [first, *messages[count + 1 :]]


def _places(text: str, contents: Sequence[str]) -> list[tuple[int, int]]:
    """Returns where messages' contents stand in rendered text, in order; templates may trim them."""
    places: list[tuple[int, int]] = []
    at = 0
    for content in contents:
        for form in (content, content.strip()):
            found = text.find(form, at) if form else -1
            if found >= 0:
                at = found + len(form)
                places.append((found, at))
                break
    return places
