"""All that was said within one conversation, as a tree: prompts, and the turns that were sampled after them.

A program sends its whole history with every request. Where that history is what was said so far, the next
prompt is the ids so far and a bridge; where it is not, a new segment begins. One turn can be followed in
several ways (branches), and one prompt can have several turns (n replies, parallel requests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from atropos_gym.messages import Message
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout._echo import Key, echo_of, key_of
from atropos_gym.rollout._turns import Prompt, Said
from atropos_gym.rollout._writing import Writing

__all__ = ["Tree"]


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
        self.writing = Writing(renderer)
        self.counts: Counter[str] = Counter()
        self._starts: dict[str, list[_Start]] = {}
        self._raw: dict[Hashable, Prompt] = {}
        self._said: list[Said] = []

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
        opening, ids = self.writing.opening(messages, tools)
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
            follows[key] = Prompt(self.writing.text(rest), best, best is None, heard, text)
        return follows[key]

    def add(self, said: Said) -> None:
        """Keeps a turn that was sampled."""
        said.prompt.said.append(said)
        self._said.append(said)
        self.writing.learn(said)

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
        heard, ids, fresh = self.writing.following(said, messages, tools)
        if fresh:
            self.counts["template"] += 1
        said.followed[block] = Prompt(ids, said, fresh, heard)
        return said.followed[block]

    def _text_after(self, said: Said) -> str | None:
        """Returns the text up to the end of a turn; None where text cannot say what was sampled."""
        if said.prompt.text is None:
            return None
        text = self.renderer.tokenizer.decode(said.ids)
        if "\ufffd" in text or (not said.cut and text == said.reply.text):  # half a character; an end unseen
            return None
        return said.prompt.text + text


def _echoed(prompt: Prompt, message: Message) -> list[Said]:
    """Returns the turns after a prompt that a message may be, the surest first, of equal ones the latest."""
    thoughts = message.get("reasoning_content")

    def surely(place: int) -> tuple[int, bool, int]:
        said = prompt.said[place]
        return (
            echo_of(said.message, said.reply, message),
            said.message.get("reasoning_content") == thoughts,
            place,
        )

    found = sorted(map(surely, range(len(prompt.said))), reverse=True)
    return [prompt.said[place] for sure, _, place in found if sure]
