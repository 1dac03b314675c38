"""A chat template of a Hugging Face tokenizer as a function from messages to text, with the clock pinned."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from atropos_gym.errors import TemplateError

__all__ = ["KNOWN_ROLES", "ChatTemplate"]

#: A role is written into the text by most templates, so it must be a known word.
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")

_CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


class ChatTemplate:
    """Renders conversations as text.

    Args:
        hf: a transformers tokenizer.
        name: what errors call it.
        template: Jinja source; None takes the tokenizer's own.
        kwargs: further variables of the template.

    Raises:
        TemplateError: there is no template.
    """

    def __init__(self, hf: Any, name: str, template: str | None, kwargs: Mapping[str, Any]) -> None:
        self._hf = hf
        self.name = name
        if template is None:
            try:
                template = hf.get_chat_template()
            except ValueError:
                raise TemplateError(f"{name} has no chat template: give template=") from None
        self.source = str(template).replace("\r\n", "\n")
        self.kwargs = dict(kwargs)
        # A run that crosses midnight must not get two prompts for one seed.
        self.today = datetime.date.today() if _CLOCK.search(self.source) else None
        self._pinned = self._pin(self.source)

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
            if message.get("role") not in KNOWN_ROLES:
                raise TemplateError(
                    f"role must be one of {', '.join(KNOWN_ROLES)}, got {message.get('role')!r} ({self.name})"
                )
        from jinja2 import TemplateError as JinjaError

        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                chat_template=self._pinned,
                add_generation_prompt=speak,
                tokenize=False,
                **self.kwargs,
            )
        except (JinjaError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateError(f"the chat template of {self.name} refuses roles {roles}: {error}") from error
        return str(text)

    @property
    def bos(self) -> str:
        """The text of BOS, which many templates write; "" where the tokenizer has none."""
        return str(self._hf.bos_token or "")

    @cached_property
    def literals(self) -> str:
        """All text that the template itself can write, pieces apart by a null character."""
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
        source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", self.source)  # a tag of transformers' own
        try:
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template of {self.name} is no valid Jinja, line {error.lineno}: {error.message}; "
                "give template= without the mistake"
            ) from None
        pieces = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
        pieces += [n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)]
        return "\0".join(pieces)

    def _pin(self, source: str) -> str:
        """Returns the template with a macro in place of the clock that it calls unasked."""
        if self.today is None:
            return source
        cases = "".join(
            "{% if format == '" + form + "' %}" + self.today.strftime(form) + "{% endif %}"
            for form in dict.fromkeys(match[1] for match in _CLOCK.findall(source))
        )
        macro = "{% macro strftime_now(format) %}" + cases + "{% endmacro %}"
        # trim_blocks eats one newline behind a tag; the template's own first newline must stay.
        return macro + ("\n" if source.startswith("\n") else "") + source
