"""TextEnv: a Gymnasium environment whose observations and actions are token ids.

A task's author writes ``begin`` and ``respond``, in text. Everything between text and ids happens here:
the prompt of every turn, the limits, when a segment ends, and what ``info`` says. No engine, no HTTP and no
torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from struct import pack
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from numpy.typing import NDArray

from atropos_gym._checks import action_ids, author_messages, finite_reward, plain_info, positive
from atropos_gym._thinking import Thinking, thinking_fault, thinking_mode, thinking_renderer, with_thinking
from atropos_gym.errors import ConfigError, PromptTooLong, TokenizerMismatch
from atropos_gym.messages import Feedback, Message, Reply
from atropos_gym.rendering import ChatRenderer, chat_renderer
from atropos_gym.spaces import TokenSequence
from atropos_gym.tokenizers import Tokenizer, load_tokenizer

__all__ = ["TextEnv"]

Ids = NDArray[np.int32]


class TextEnv(gymnasium.Env[Any, Any]):
    """Base of all text tasks: observations are whole prompts, actions are the sampled ids.

    Description:
        Subclasses write ``begin`` (what the policy reads first) and ``respond`` (what comes back to a
        reply). An episode is one or more *turns*; a turn is one action.

    Actions:
        The ids that the policy sampled this turn, its end id included when it sampled one. Anything in
        ``TokenSequence(tokenizer.rows, max_turn_tokens)`` is accepted: cut, empty, control ids, ids after
        an end id.

    Observations:
        The whole prompt of the next turn, in ``TokenSequence(tokenizer.rows, max_tokens)``. It begins with
        the last observation and the action, position by position, unless ``info["segment"]`` grew. The
        final observation is the last observation and the action, nothing added.

    Rewards:
        ``Feedback.reward`` of the turn.

    Episode end:
        ``terminated`` as the task says, and always after the only turn of a one-turn task; ``truncated``
        where ``max_turns`` is reached or another turn does not fit in ``max_tokens``.

    Info:
        Always ``segment`` and ``turn`` (from 0: the turn to be played, at the end the turns played) and
        ``max_new_tokens``; ``invalid`` and ``reward_terms`` where they apply; ``invalid_reason`` after a
        reply that broke ``thinking``; at the end ``end_reason`` and, where known, ``success`` and
        ``is_success``.

    Arguments:
        tokenizer: a name, a folder, or a tokenizer.
        system_prompt: a system message before everything that ``begin`` says.
        render_mode: ``"ansi"``: ``render()`` gives the conversation as text.
        renderer: a ``ChatRenderer`` with settings of its own, in place of ``tokenizer``.
        max_turns: most turns of an episode.
        max_turn_tokens: most ids in an action.
        max_prompt_tokens: most ids in the first prompt.
        max_feedback_tokens: ids that ``max_tokens`` reserves for each feedback.
        max_tokens: most ids in a segment; None computes it from the others.
        thinking: ``"auto"``: as the policy likes. ``"required"``: a thought, closed, before the content.
            ``"forbidden"``: none but an empty one. An int: none, or at most so many sampled ids before its
            closing tag. Where the generation prompt opened the thought, everything up to the closing tag is
            it. A reply that breaks this is invalid: ``respond`` reads empty ``content`` and the reason
            (``reply.fault``), ``info`` has it as ``invalid_reason``: ``no_thinking``, ``unclosed_think``,
            ``thinking_forbidden`` or ``thinking_too_long``. The first two modes also set the chat template's
            own switch (``enable_thinking``) where it has one; a ``renderer`` given stays as it is.
        history: ``"whole"``: a segment grows through the episode. ``"latest"``: every turn's prompt is the
            system prompt, ``begin``'s messages but the last, and the newest feedback; each a segment.

    Example:
        >>> class Reverse(TextEnv):
        ...     def begin(self, options):
        ...         self.word = "".join(self.np_random.choice(list("abc"), 4))
        ...         return f"Write {self.word} backwards."
        ...
        ...     def respond(self, reply):
        ...         return Feedback(reward=float(reply.content.strip() == self.word[::-1]), terminated=True)
        >>> env = Reverse()
        >>> obs, info = env.reset(seed=0)
        >>> env.tokenizer.decode(obs)
        'Write cbba backwards.'
        >>> env.step(np.array(env.renderer.say("abbc"), np.int32))[1:3]
        (1.0, True)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}

    max_turns: int = 1
    max_turn_tokens: int = 64
    max_prompt_tokens: int = 512
    max_feedback_tokens: int = 256
    #: None on a class means "computed"; every instance has an int.
    max_tokens: int = None  # type: ignore[assignment]
    history: Literal["whole", "latest"] = "whole"
    thinking: Thinking = "auto"

    #: Every reply that can ever be legal, where they are few.
    answers: tuple[str, ...] | None = None
    #: Known mean returns: ``random``, ``optimal`` or ``reference``. Replace it, do not write into it.
    scores: Mapping[str, float] = {}

    observation_space: TokenSequence
    action_space: TokenSequence

    _playing: bool | None = None

    def __init__(
        self,
        *,
        tokenizer: str | Tokenizer | Any = "bytes",
        system_prompt: str | None = None,
        render_mode: str | None = None,
        renderer: ChatRenderer | None = None,
        max_turns: int | None = None,
        max_turn_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
        max_feedback_tokens: int | None = None,
        max_tokens: int | None = None,
        history: Literal["whole", "latest"] | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        # SB3 makes environments with render_mode="rgb_array" unasked: taken, and nothing is drawn.
        if render_mode not in (None, "ansi", "rgb_array"):
            raise ConfigError(f"render_mode must be None or 'ansi', got {render_mode!r}")
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise ConfigError(f"system_prompt must be a str or None, got {system_prompt!r:.60}")
        self.render_mode = render_mode
        self.system_prompt = system_prompt
        self.thinking = thinking_mode(self.thinking if thinking is None else thinking)
        self.renderer = self._choose_renderer(tokenizer, renderer)
        self.tokenizer: Tokenizer = self.renderer.tokenizer
        self.stop_ids: tuple[int, ...] = self.renderer.stop_ids

        self.max_turns = positive("max_turns", self.max_turns if max_turns is None else max_turns)
        self.max_turn_tokens = positive(
            "max_turn_tokens", self.max_turn_tokens if max_turn_tokens is None else max_turn_tokens
        )
        self.max_prompt_tokens = positive(
            "max_prompt_tokens", self.max_prompt_tokens if max_prompt_tokens is None else max_prompt_tokens
        )
        self.max_feedback_tokens = positive(
            "max_feedback_tokens",
            self.max_feedback_tokens if max_feedback_tokens is None else max_feedback_tokens,
        )
        self.history = self.history if history is None else history
        if self.history not in ("whole", "latest"):
            raise ConfigError(f"history must be 'whole' or 'latest', got {self.history!r}")
        self.max_tokens = self._choose_max_tokens(self.max_tokens if max_tokens is None else max_tokens)

        self.observation_space = TokenSequence(self.tokenizer.rows, self.max_tokens)
        self.action_space = TokenSequence(self.tokenizer.rows, self.max_turn_tokens)
        self.messages: list[Message] = []
        self._playing = False
        self._ended = ""
        self._turn = 0
        self._segment = 0
        self._ids = array("i")  # the segment so far, ids of 32 bits; it only grows within a segment
        self._conversation: list[Message] = []  # the messages of this segment
        self._standing: list[Message] = []  # history="latest": what stands before the newest feedback

    def _choose_renderer(
        self, tokenizer: str | Tokenizer | Any, renderer: ChatRenderer | None
    ) -> ChatRenderer:
        """Returns the given renderer or the tokenizer's own; two tokenizers that differ are refused."""
        if renderer is None:
            return thinking_renderer(chat_renderer(tokenizer), self.thinking)
        if not isinstance(renderer, ChatRenderer):
            raise ConfigError(f"renderer must be a ChatRenderer or None, got {renderer!r:.60}")
        if not (isinstance(tokenizer, str) and tokenizer == "bytes"):
            wanted = load_tokenizer(tokenizer)
            if wanted.fingerprint != renderer.tokenizer.fingerprint:
                raise TokenizerMismatch(
                    f"tokenizer={wanted.name} differs from the renderer's {renderer.tokenizer.name}: give one"
                )
        return renderer

    def _choose_max_tokens(self, wanted: int | None) -> int:
        """Returns the size of one segment, computed where ``wanted`` is None."""
        turn, bridge = self.max_turn_tokens, self.max_feedback_tokens + self.renderer.min_bridge
        # Two turns must fit, or an episode could be truncated in its first step.
        least = self.max_prompt_tokens + turn
        if self.max_turns > 1:
            least += bridge + turn
        if wanted is None:
            if self.history == "latest":
                return least
            return self.max_prompt_tokens + self.max_turns * turn + (self.max_turns - 1) * bridge
        if positive("max_tokens", wanted) < least:
            raise ConfigError(
                f"max_tokens={wanted} is too small: it must be at least {least} for "
                f"max_prompt_tokens={self.max_prompt_tokens}, max_turn_tokens={turn}, max_feedback_tokens="
                f"{self.max_feedback_tokens} and a bridge of {self.renderer.min_bridge}"
            )
        return wanted

    # --- what a task's author writes ---

    def begin(self, options: dict[str, Any]) -> str | Sequence[Message]:
        """Starts an episode and returns what the policy reads first.

        Args:
            options: of ``reset``; an empty dict if there were none.

        Returns:
            A string (one user message) or messages. All chance comes from ``self.np_random``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define begin(self, options)")

    def respond(self, reply: Reply) -> Feedback:
        """Plays the reply and returns what comes back; no reply is an error."""
        raise NotImplementedError(f"{type(self).__name__} must define respond(self, reply)")

    def sample_reply(self) -> str | None:
        """Returns what a uniformly random legal player would say now, or None where that is unknown."""
        return None

    def legal_replies(self) -> tuple[str, ...] | None:
        """Returns all replies that are legal now, where they are few; None where that is unknown.

        Those of ``answers`` that ``action_mask`` of ``extra_info`` allows, one entry each; without a mask all
        of them. A task that knows better says it itself.

        Raises:
            ConfigError: the mask has not one entry for each answer.
        """
        answers = self.answers
        mask = None if answers is None else self.extra_info().get("action_mask")
        if answers is None or mask is None:
            return answers
        if len(mask) != len(answers):
            raise ConfigError(
                f"{type(self).__name__}: action_mask has {len(mask)} entries for {len(answers)} answers; "
                "define legal_replies()"
            )
        return tuple(answer for answer, legal in zip(answers, mask, strict=True) if legal)

    def say(self, content: str) -> list[int]:
        r"""Returns the ids of a turn whose reply has this content, for ``sample_reply`` and ``answers``.

        A thought that the generation prompt opened is closed first; where ``thinking`` is required, three
        dots are thought.

        Example:
            >>> env = TextEnv(thinking="required")
            >>> env.tokenizer.decode(env.say("hit"))
            '<think>\n...\n</think>\n\nhit'
        """
        return self.renderer.say(with_thinking(self.thinking, content, self.renderer))

    def reseed(self, seed: int) -> None:
        """Sets the chance that comes after the start; called between ``reset`` and the first step."""
        self._np_random, self._np_random_seed = seeding.np_random(seed)

    def extra_info(self) -> Mapping[str, Any]:
        """Returns what ``info`` says of the state that the policy now faces, such as ``legal_actions``."""
        return {}

    # --- Gymnasium's side ---

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Ids, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: of all chance in it; None goes on with the present generator.
            options: handed to ``begin``.

        Returns:
            The first prompt, int32 of shape ``(length,)``, and ``info``.

        Raises:
            PromptTooLong: the prompt has more than ``max_prompt_tokens`` ids.
        """
        if self._playing is None:
            raise RuntimeError(f"{type(self).__name__}.__init__ must call super().__init__(**kwargs)")
        self._playing = False
        super().reset(seed=seed)
        said = author_messages(self.begin(dict(options) if options else {}), type(self).__name__, "begin()")
        opening = self._with_system(said)
        ids = self.renderer.prompt(opening)
        if len(ids) > self.max_prompt_tokens:
            raise PromptTooLong(
                f"the first prompt has {len(ids)} ids, more than max_prompt_tokens={self.max_prompt_tokens} "
                f"({self.tokenizer.name} tokenizer): raise max_prompt_tokens or shorten the prompt"
            )
        self._ids = array("i")
        self._add_ids(ids)
        self.messages = opening
        self._conversation = [*opening]
        self._standing = opening[:-1]
        self._turn = self._segment = 0
        self._playing = True
        return self._observation(), self._info(self.extra_info())

    def step(self, action: Any) -> tuple[Ids, float, bool, bool, dict[str, Any]]:
        """Plays one turn.

        Args:
            action: the sampled ids, shape ``(length,)``, the end id included where it was sampled.

        Returns:
            Observation, reward, terminated, truncated, info.

        Raises:
            ResetNeeded: before ``reset`` and after the episode's end.
            TypeError: the action is no 1-D sequence of integers.
            ValueError: an id or the length is outside the action space; position and value are named.
        """
        if not self._playing:
            raise ResetNeeded(
                f"the episode is over ({self._ended}): call reset()"
                if self._ended
                else "call reset() before step()"
            )
        turn_ids = action_ids(action, self.action_space)
        # Until the turn is complete the episode is not: an error in respond() leaves nothing half played.
        self._playing = False
        self._ended = "its last step failed"
        reply = self.renderer.reply(turn_ids)
        fault = thinking_fault(self.thinking, reply, self.renderer)
        if fault is not None:
            reply = replace(reply, content="", tool_calls=(), fault=fault)
        feedback = self.respond(reply)
        if not isinstance(feedback, Feedback):
            raise TypeError(
                f"{type(self).__name__}.respond() must return Feedback, got {type(feedback).__name__}"
            )
        reward = finite_reward(feedback.reward, type(self).__name__)
        said = author_messages(feedback.content, type(self).__name__, "Feedback.content")
        self._turn += 1
        self._add_ids(turn_ids)
        self._add_messages([Message(role="assistant", content=reply.text)])

        terminated, truncated = bool(feedback.terminated), bool(feedback.truncated)
        reason = "terminated" if terminated else "truncated"
        if not (terminated or truncated):
            if self._turn >= self.max_turns:
                truncated, reason = True, "max_turns"
            elif not self._open_turn(turn_ids, said, feedback.restart):
                truncated, reason = True, "max_tokens"
            else:
                self._playing = True
                info = self._info(self.extra_info(), feedback, fault)
                return self._observation(), reward, False, False, info
        self.messages.extend(said)
        if self.max_turns == 1:  # a one-turn task is over when its turn is; checkers refuse truncation here
            terminated, truncated = True, False
            reason = "terminated" if reason == "max_turns" else reason
        self._ended = str(feedback.info.get("end_reason", reason))
        return (
            self._observation(),
            reward,
            terminated,
            truncated,
            self._info({}, feedback, fault, self._ended),
        )

    @property
    def playing(self) -> bool:
        """Whether the episode goes on: the next call may be ``step``."""
        return bool(self._playing)

    def _observation(self) -> Ids:
        """Returns the ids of the segment so far as the caller's own array: the one copy of a turn."""
        return np.frombuffer(self._ids, dtype=np.int32).copy()

    def _add_ids(self, ids: list[int]) -> None:
        self._ids.frombytes(pack(f"{len(ids)}i", *ids))  # takes half as long as fromlist

    def _add_messages(self, messages: Sequence[Message]) -> None:
        self.messages.extend(messages)
        self._conversation.extend(messages)

    def _with_system(self, messages: list[Message]) -> list[Message]:
        """Returns the messages that open a segment, the system prompt first."""
        if self.system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            raise ConfigError(
                f"{type(self).__name__} opens with a system message of its own: leave system_prompt= out"
            )
        return [Message(role="system", content=self.system_prompt), *messages]

    def _open_turn(self, turn_ids: list[int], said: list[Message], restart: Sequence[Message] | None) -> bool:
        """Writes the prompt of the next turn; returns False where it does not fit, and then changes nothing.

        Args:
            turn_ids: the turn's ids, the last of the segment so far.
            said: new messages.
            restart: messages that open a new segment in place of the conversation so far.
        """
        opening: list[Message] | None = None
        if restart:
            opening = author_messages(restart, type(self).__name__, "Feedback.restart")
            if opening[0]["role"] != "system":  # else the restart brings a system message of its own
                opening = self._with_system(opening)
            ids, new_segment = self.renderer.prompt([*opening, *said]), True
        elif self.history == "latest":
            ids, new_segment = self.renderer.prompt([*self._standing, *said]), True
        else:
            before = islice(self._ids, len(self._ids) - len(turn_ids))
            ids, new_segment = self.renderer.advance(before, turn_ids, self._conversation, said)
        length = len(ids) + (0 if new_segment else len(self._ids))
        if length + self.max_turn_tokens > self.max_tokens:
            return False
        if new_segment:
            self._ids = array("i")
            self._segment += 1
        self._add_ids(ids)
        if opening is not None:
            self._conversation = []
            self._standing = opening if said else opening[:-1]
            self._add_messages(opening)
        self._add_messages(said)
        return True

    def _info(
        self,
        extra: Mapping[str, Any],
        feedback: Feedback | None = None,
        fault: str | None = None,
        end_reason: str | None = None,
    ) -> dict[str, Any]:
        """Returns a fresh ``info``."""
        info: dict[str, Any] = plain_info(extra) if extra else {}
        if feedback is not None:
            if feedback.info:
                info.update(plain_info(feedback.info))
            if feedback.invalid:
                info["invalid"] = True
            if feedback.reward_terms:
                info["reward_terms"] = {str(k): float(v) for k, v in feedback.reward_terms.items()}
        if fault is not None:  # whatever the task found in the empty content, this is why
            info["invalid"] = True
            info["invalid_reason"] = fault
        info["segment"] = self._segment
        info["turn"] = self._turn
        info["max_new_tokens"] = self.max_turn_tokens
        if end_reason is not None and feedback is not None:
            info["end_reason"] = end_reason
            if feedback.success is not None:
                info["success"] = info["is_success"] = bool(feedback.success)
        return info

    def render(self) -> str | None:
        """Returns the conversation as text in ``"ansi"`` mode, else None."""
        if self.render_mode != "ansi":
            return None
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    def close(self) -> None:
        """Releases what the task holds; may be called twice."""
