"""GymTextEnv: any Gymnasium simulator with an action that can be named, as a text task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Feedback, Message, Reply
from atropos_gym.parsing import ACTION_FORMATS, ParsedAction, format_action, parse_action
from atropos_gym.text_env import TextEnv
from atropos_gym.wrappers._simulators import make_simulator
from atropos_gym.wrappers.describers import Describer, find_describer

__all__ = ["GymTextEnv"]

_DEFAULT_MAX_TURNS = 100

_WHY_INVALID = {
    "no_container": "it has no <action> tags",
    "cut_off": "it was cut off",
    "unclosed_think": "its thinking was not closed",
    "no_thinking": "it did not think first",
    "thinking_forbidden": "it was to be without thinking",
    "thinking_too_long": "its thinking was too long",
    "not_an_action": "it names no action",
    "several_actions": "it names several actions",
    "conflict": "its number and its word differ",
    "out_of_range": "there is no action of that number",
    "not_legal": "that action is not possible now",
    "too_long": "it is too long",
}


class GymTextEnv(TextEnv):
    """A Gymnasium simulator told in words and played in words.

    Description:
        Each turn the policy reads the state, says an action, and the simulator steps. The first prompt is the
        rules (as the system message) and the state; every later message repeats the state and the format, so
        that ``history="latest"`` shows all that matters.

    Actions:
        A reply whose text names one action in the declared ``format``.

    Observations:
        The whole prompt, as for every ``TextEnv``.

    Rewards:
        The simulator's own; ``invalid_reward`` for a reply that is no legal action.

    Episode end:
        When the simulator ends, after ``max_turns``, or, with ``on_invalid="end"``, at the first invalid
        reply (``end_reason`` is then ``"invalid"``).

    Info:
        ``legal_actions`` and ``action_mask`` where the simulator gives a mask; ``invalid`` and
        ``invalid_reason`` after a reply that was no action.

    Arguments:
        simulator: an environment, which keeps its wrappers, or an id, which is made bare: its own time limit
            becomes the default of ``max_turns``.
        describe: the name of a style, a ``Describer``, or a function from observation to text.
        parse: reads a reply's text in place of ``format``: returns an action, None, or a ``ParsedAction``.
        format: ``"tag"`` or ``"bare_word"``.
        names: one word for each action; the describer's where None, and numbers where it has none either.
        on_invalid: ``"retry"``: the turn counts and the state is told again; ``"end"``: the episode is over.
        invalid_reward: the reward of an invalid reply.
        simulator_kwargs: keywords for making a simulator from its id.
        keywords: those of ``TextEnv``.

    Example:
        >>> env = GymTextEnv("FrozenLake-v1", describe="terse", simulator_kwargs={"is_slippery": False})
        >>> obs, info = env.reset(seed=0)
        >>> env.tokenizer.decode(obs)
        'row 0 col 0'
        >>> obs, reward, *_ = env.step(env.renderer.say("<action>down</action>"))
        >>> env.messages[-1]["content"]
        'row 1 col 0'
    """

    #: 0: the simulator's own limit where one is known, else 100.
    max_turns: int = 0
    max_prompt_tokens: int = 1024

    def __init__(
        self,
        simulator: str | gymnasium.Env[Any, Any],
        *,
        describe: str | Describer | Callable[[Any], str] | None = None,
        parse: Callable[[str], Any] | None = None,
        format: str = "tag",
        names: Sequence[str] | None = None,
        on_invalid: Literal["retry", "end"] = "retry",
        invalid_reward: float = -1.0,
        simulator_kwargs: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        system_prompt: str | None = None,
        **keywords: Any,
    ) -> None:
        if on_invalid not in ("retry", "end"):
            raise ConfigError(f"on_invalid must be 'retry' or 'end', got {on_invalid!r}")
        if format not in ACTION_FORMATS:
            raise ConfigError(f"format must be one of {', '.join(ACTION_FORMATS)}; got {format!r}")
        self.simulator, limit = self._make(simulator, simulator_kwargs or {})
        own_limit = self.max_turns or limit or _DEFAULT_MAX_TURNS
        super().__init__(max_turns=own_limit if max_turns is None else max_turns, **keywords)
        self.describer = find_describer(self.simulator, describe)
        self.format = format
        self.on_invalid = on_invalid
        self.invalid_reward = float(invalid_reward)
        self._parse = parse
        self._names = tuple(names) if names is not None else self.describer.names
        self._aliases = dict(self.describer.aliases) if names is None else {}
        self._actions = self._check_actions()
        self.answers = tuple(map(self._say, self._actions)) if parse is None else None
        self._opening = self._join_system(system_prompt)
        self._seed: int | None = None
        self._mask: list[int] | None = None
        self._state = ""
        self._solved: bool | None = None  # whether an episode that is cut off now was a success
        self._player: np.random.Generator | None = None

    @staticmethod
    def _make(
        simulator: str | gymnasium.Env[Any, Any], keywords: Mapping[str, Any]
    ) -> tuple[gymnasium.Env[Any, Any], int | None]:
        """Returns the simulator and its own time limit, where one is known."""
        if isinstance(simulator, str):
            return make_simulator(simulator, keywords)
        if not isinstance(simulator, gymnasium.Env):
            raise ConfigError(f"simulator must be an id or a gymnasium.Env, got {type(simulator).__name__}")
        if isinstance(simulator.unwrapped, TextEnv):
            raise ConfigError(f"simulator must not be a text environment already, got {simulator}")
        if keywords:
            raise ConfigError(
                f"simulator_kwargs belong to an id, and an environment was given: {dict(keywords)}"
            )
        return simulator, None if simulator.spec is None else simulator.spec.max_episode_steps

    def _check_actions(self) -> dict[int, str]:
        """Returns the word of each discrete action; empty where ``parse`` reads another space."""
        space = self.simulator.action_space
        if not isinstance(space, Discrete):
            if self._parse is None:
                raise ConfigError(
                    f"the action space {space} has no words: give parse=, a function from text to action"
                )
            return {}
        first, n = int(space.start), int(space.n)
        words = self._names or tuple(map(str, range(first, first + n)))
        # Says now what would be wrong with the names at every reply.
        parse_action("", space, self.format, names=self._names, aliases=self._aliases)
        return dict(zip(range(first, first + n), words, strict=True))

    def _join_system(self, system_prompt: str | None) -> list[Message]:
        """Returns what stands before the state: one system message, or none."""
        said = "\n\n".join(text for text in (system_prompt, self.describer.rules()) if text)
        return [Message(role="system", content=said)] if said else []

    def _say(self, action: int) -> str:
        return format_action(self._actions[action], self.format)

    # --- what is said ---

    def begin(self, options: dict[str, Any]) -> list[Message]:
        """Resets the simulator; returns the rules and the first state."""
        observation, info = self.simulator.reset(seed=self._seed, options=options or None)
        self._player = None
        self._solved = self.describer.success(observation, 0.0, False)
        return self.opening(observation, info)

    def opening(self, observation: Any, info: Mapping[str, Any] | None = None) -> list[Message]:
        """Returns what the policy reads first of an episode that begins in this state."""
        return [*self._opening, Message(role="user", content=self._tell(observation, info or {}))]

    def respond(self, reply: Reply) -> Feedback:
        """Steps the simulator with the action that the reply names."""
        if reply.fault is not None:
            return self._refuse(reply.fault)
        action = self._read(reply.content)
        if not action.valid:
            return self._refuse(str(action.reason))
        observation, gain, terminated, truncated, info = self.simulator.step(action.value)
        reward = float(gain)
        if not (terminated or truncated):
            # What is known where this turn is the last one that max_turns allows.
            self._solved = self.describer.success(observation, reward, False)
            return Feedback(self._tell(observation, info), reward=reward, success=self._solved)
        terminated = bool(terminated)
        return Feedback(
            self.describer.outcome(observation, reward, terminated) or None,
            reward=reward,
            terminated=terminated,
            truncated=bool(truncated) and not terminated,
            success=self.describer.success(observation, reward, terminated),
        )

    def _tell(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Returns the state in words, and the format unless the describer is terse."""
        mask = info.get("action_mask")
        self._mask = None if mask is None or not self._actions else [int(allowed) for allowed in mask]
        state = self.describer.describe(observation)
        self._state = state if self.describer.terse else f"{state}\n{self._format_hint()}".rstrip("\n")
        return self._state

    def _format_hint(self) -> str:
        """Returns how to answer, with the words that are legal now."""
        if self._parse is not None or not self._actions:
            return ""
        words = ", ".join(self._actions[action] for action in self._legal())
        if self.format == "bare_word":
            return f"Answer with one of these words: {words}."
        return f"Possible actions: {words}. Answer as <action>NAME</action>."

    def _read(self, content: str) -> ParsedAction:
        """Returns the action in a reply."""
        space = self.simulator.action_space
        if self._parse is not None:
            action = self._parse(content)
            if not isinstance(action, ParsedAction):
                known = action is not None and space.contains(action)
                action = ParsedAction(action, True) if known else ParsedAction(None, False, "not_an_action")
            if action.valid and self._mask is not None and action.value not in self._legal():
                action = ParsedAction(None, False, "not_legal")
            return action
        legal = None if self._mask is None else self._legal()
        return parse_action(
            content, space, self.format, names=self._names, aliases=self._aliases, legal=legal
        )

    def _refuse(self, reason: str) -> Feedback:
        """Returns what an invalid reply brings: the end, or the same state again."""
        info: dict[str, Any] = {"invalid_reason": reason}
        why = f"Your answer is not valid: {_WHY_INVALID.get(reason, reason)}."
        if self.on_invalid == "end":
            return Feedback(
                why,
                reward=self.invalid_reward,
                terminated=True,
                success=False,
                invalid=True,
                info={**info, "end_reason": "invalid"},
            )
        said = self._state if self.describer.terse else f"{why}\n{self._state}"
        return Feedback(said, reward=self.invalid_reward, success=self._solved, invalid=True, info=info)

    # --- what is legal, and chance ---

    def _legal(self) -> tuple[int, ...]:
        """Returns the discrete actions that are allowed now."""
        if self._mask is None:
            return tuple(self._actions)
        return tuple(action for action, allowed in zip(self._actions, self._mask, strict=True) if allowed)

    def extra_info(self) -> Mapping[str, Any]:
        """Returns ``action_mask`` and ``legal_actions`` where the simulator gives a mask."""
        if self._mask is None:
            return {}
        return {
            "action_mask": list(self._mask),
            "legal_actions": [self._actions[action] for action in self._legal()],
        }

    def sample_reply(self) -> str | None:
        """Returns a legal action, drawn uniformly; drawing it does not change what the simulator does."""
        legal = self._legal() if self.answers else ()
        if not legal:
            return None
        if self._player is None:
            self._player = self.np_random.spawn(1)[0]
        return self._say(legal[int(self._player.integers(len(legal)))])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts an episode; the simulator is reset with the same seed, so it deals what it deals bare."""
        self._seed = seed
        return super().reset(seed=seed, options=options)

    def reseed(self, seed: int) -> None:
        """Sets the chance that comes after the start, the simulator's too."""
        super().reseed(seed)
        self.simulator.unwrapped.np_random = self.np_random
        self._player = None

    def close(self) -> None:
        """Closes the simulator; may be called twice."""
        self.simulator.close()
