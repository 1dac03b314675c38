"""A chat template of a Hugging Face tokenizer as a function from messages to text, with the clock pinned."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from atropos_gym.errors import ConfigError, TemplateError
from atropos_gym.rendering.clock import pin_clock, pinned_day
from atropos_gym.rendering.said import ROLES
from atropos_gym.tokenizers.hf import HFTokenizer

__all__ = ["ChatTemplate"]

#: What a renderer itself hands to the template.
_OURS = frozenset(
    "messages conversations tools add_generation_prompt chat_template continue_final_message "
    "return_assistant_tokens_mask tokenize".split()
)


class ChatTemplate:
    """Renders conversations as text.

    Args:
        tokenizer: whose template it is.
        template: Jinja source, or the name of one of the tokenizer's templates; None takes its own.
        kwargs: further variables of the template.

    Attributes:
        name: what errors call it.
        source: Jinja source.
        bos: the text of BOS, which many templates write; "" where the tokenizer has none.
        today: the day that was pinned, where the template writes one unasked; else None.

    Raises:
        TemplateError: there is no template, or it is no Jinja.
        ConfigError: ``kwargs`` that a renderer sets itself.
    """

    def __init__(self, tokenizer: HFTokenizer, template: str | None, kwargs: Mapping[str, Any]) -> None:
        self.name = tokenizer.name
        self._tokenizer = tokenizer
        self.source = _choose(tokenizer, template).replace("\r\n", "\n")
        taken = sorted(_OURS.intersection(kwargs))
        if taken:
            raise ConfigError(f"template_kwargs cannot hold {taken[0]!r}: the renderer sets it")
        self._own_tools = isinstance(tokenizer.chat_template, Mapping) and template is None
        self._own_tools = self._own_tools and "tool_use" in tokenizer.chat_template
        self.kwargs = dict(kwargs)
        given = {**tokenizer.hf.special_tokens_map, **self.kwargs}
        self.bos = str(given.get("bos_token") or "")
        self._given = {name: value for name, value in given.items() if name in self._names}
        self._text = self.source
        self.today: datetime.date | None = None
        self._only_parts = False
        if "strftime_now" in self._names:
            day = pinned_day(self.kwargs, "date_string" in self._names, self.name)
            self._text = pin_clock(self.source, day)
            if self._shows_the_day(day):
                self.today = day
        self._only_parts = not self._keeps("Pq7x") and self._keeps([{"type": "text", "text": "Pq7x"}])

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the text beside the messages."""
        pinned = self.today.isoformat() if self.today else None
        return {"template": self.source, "template_kwargs": self.kwargs, "date": pinned}

    def render(self, messages: Sequence[Mapping[str, Any]], speak: bool, tools: Any = None) -> str:
        """Returns the conversation as text, with a generation prompt if ``speak``.

        Raises:
            TemplateError: an unknown role, or the template refuses the messages.
        """
        for message in messages:
            if message.get("role") not in ROLES:
                raise TemplateError(
                    f"role must be one of {', '.join(ROLES)}, got {message.get('role')!r} ({self.name})"
                )
        if tools and self._own_tools:
            raise TemplateError(
                f"{self.name} has a chat template of its own for tools: set template='tool_use'"
            )
        if self._only_parts:
            messages = [_in_parts(message) for message in messages]
        return self._fill(self._text, messages, speak, tools or None)

    def _fill(self, source: str, messages: Sequence[Mapping[str, Any]], speak: bool, tools: Any) -> str:
        """Returns what Jinja makes of a template."""
        try:
            return self._tokenizer.fill_template(
                source, messages, speak=speak, tools=tools, variables=self._given
            )
        except Exception as error:  # a template is code of strangers: it may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            reason = " ".join(str(error).split())
            raise TemplateError(
                f"the chat template of {self.name} refuses roles {roles}: {reason}"
            ) from error

    def reads(self, name: str) -> bool:
        """Returns whether the template reads a variable, such as ``enable_thinking``."""
        return name in self._names

    @cached_property
    def takes_parts(self) -> bool:
        """Whether content may be a list of parts: it is written like the text in it."""
        if self._only_parts:
            return True
        try:
            text = self.render([{"role": "user", "content": "Pq7x"}], True)
            return text == self.render([_in_parts({"role": "user", "content": "Pq7x"})], True)
        except TemplateError:
            return False

    @cached_property
    def image(self) -> str:
        """What the template writes for an image in a user's message; "" where it writes none."""
        if not self.takes_parts:
            return ""
        parts: list[dict[str, Any]] = [{"type": "text", "text": "Pq7x"}]
        plain, shown = (
            {"role": "user", "content": content} for content in (parts, [*parts, {"type": "image"}])
        )
        try:
            before, _, behind = self.render([plain], True).partition("Pq7x")
            lead, found, rest = self.render([shown], True).partition("Pq7x")
        except TemplateError:
            return ""
        if not found or not lead.startswith(before) or not rest.endswith(behind):
            return ""
        # Some templates write all images of a message in front of its text.
        return lead[len(before) :] + rest[: len(rest) - len(behind)]

    @cached_property
    def literals(self) -> str:
        """All text that the template itself can write, pieces apart by a null character."""
        import jinja2.nodes

        pieces = [node.data for node in self.tree.find_all(jinja2.nodes.TemplateData)]
        pieces += [n.value for n in self.tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)]
        return "\0".join(pieces)

    @cached_property
    def _names(self) -> frozenset[str]:
        """Names that the template reads."""
        import jinja2.nodes

        return frozenset(n.name for n in self.tree.find_all(jinja2.nodes.Name) if n.ctx == "load")

    @cached_property
    def tree(self) -> Any:
        """The template, parsed."""
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
        source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", self.source)  # a tag of transformers' own
        try:
            return environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template of {self.name} is no valid Jinja, line {error.lineno}: {error.message}; "
                "give template= without the mistake"
            ) from None

    def _shows_the_day(self, day: datetime.date) -> bool:
        """Returns whether prompts of another day would differ."""
        other = pin_clock(self.source, day - datetime.timedelta(days=1700))
        asked = {"role": "user", "content": "Pq7x"}
        for conversation in ([asked], [{"role": "system", "content": "Sq7x"}, asked]):
            try:
                if self.render(conversation, True) != self._fill(other, conversation, True, None):
                    return True
            except TemplateError:
                continue
        return False

    def _keeps(self, content: Any) -> bool:
        """Returns whether a message's text survives in this form."""
        try:
            return "Pq7x" in self.render([{"role": "user", "content": content}], True)
        except TemplateError:
            return False


def _choose(tokenizer: HFTokenizer, wanted: str | None) -> str:
    """Returns the source of the template that is meant."""
    own = tokenizer.chat_template
    if wanted is not None:
        if not isinstance(wanted, str):
            raise ConfigError(f"template must be Jinja source as a str, got {type(wanted).__name__}")
        if isinstance(own, Mapping) and wanted in own:
            return str(own[wanted])
        if isinstance(own, Mapping) and "{" not in wanted:
            raise ConfigError(
                f"template={wanted!r:.60} is neither Jinja source nor one of the templates of "
                f"{tokenizer.name}: {', '.join(sorted(own))}"
            )
        return wanted
    if isinstance(own, Mapping):
        if "default" not in own:
            raise TemplateError(
                f"{tokenizer.name} has several chat templates and no default: set template= to one of "
                f"{', '.join(sorted(own))}"
            )
        return str(own["default"])
    if not own:
        raise TemplateError(f"{tokenizer.name} has no chat template: give template=")
    return str(own)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}
