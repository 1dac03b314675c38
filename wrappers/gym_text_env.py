"""GymTextEnv: any Gymnasium simulator whose observations and actions can be said, as a text task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

from atropos_gym._checks import finite_reward
from atropos_gym.errors import ConfigError
from atropos_gym.messages import Feedback, Message, Reply
from atropos_gym.parsing import REASONS, ParsedAction
from atropos_gym.text_env import TextEnv
from atropos_gym.wrappers._simulators import make_simulator
from atropos_gym.wrappers._spoken_actions import Choice, SpokenActions, default_format
from atropos_gym.wrappers.describers import Describer, find_describer

__all__ = ["GymTextEnv"]

_DEFAULT_MAX_TURNS = 100

# Least limits of ids; a simulator that says more by itself gets more.
_TURN_TOKENS = 64
_PROMPT_TOKENS = 1024
_FEEDBACK_TOKENS = 256

_WHY_INVALID: dict[str, str] = dict(
    [
        *REASONS.items(),
        ("no_thinking", "it did not think first"),
        ("thinking_forbidden", "it was to be without thinking"),
        ("thinking_too_long", "its thinking was too long"),
    ]
)
_WHY_CHARS = 96
"""Room for the sentence that says why a reply was invalid."""


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
        describe: the name of a style (``"full"``, ``"terse"``), a ``Describer``, or a function from
            observation to text. None: the simulator's own, else what its observation space says.
        parse: reads a reply's text in place of ``format``: returns an action, None, or a ``ParsedAction``.
        format: ``"tag"``, ``"bare_word"``, ``"number"``, ``"json"``, ``"tool_call"`` or ``"box"``. None:
            ``"tag"`` for discrete actions, ``"box"`` for arrays, ``"json"`` for ``Dict`` and ``Tuple``.
        names: one word for each discrete action, the describer's where None, and numbers where it has none
            either; for ``Dict`` and ``Tuple`` actions they mirror the space.
        on_invalid: ``"retry"``: the turn counts and the state is told again; ``"end"``: the episode is over.
        invalid_reward: the reward of an invalid reply.
        simulator_kwargs: keywords for making a simulator from its id.
        keywords: those of ``TextEnv``. Limits of ids that neither they nor the class name are as large as
            the simulator's longest descriptions and replies need with the bytes tokenizer.

    Example:
        >>> env = GymTextEnv("FrozenLake-v1", describe="terse", simulator_kwargs={"is_slippery": False})
        >>> obs, info = env.reset(seed=0)
        >>> env.tokenizer.decode(obs)
        'row 0 col 0'
        >>> obs, reward, *_ = env.step(env.renderer.say("<action>down</action>"))
        >>> env.messages[-1]["content"]
        'row 1 col 0'
        >>> swing = GymTextEnv("Pendulum-v1")
        >>> _ = swing.reset(seed=0)
        >>> print(swing.messages[-1]["content"])
        cosine of the angle: 0.652, sine of the angle: 0.7582, angular velocity: -0.4604
        Answer with a list of 1 number, from -2 to 2, in brackets.
    """

    #: 0: the simulator's own limit where one is known, else 100.
    max_turns: int = 0
    #: 0 in these three: as large as the simulator needs.
    max_turn_tokens: int = 0
    max_prompt_tokens: int = 0
    max_feedback_tokens: int = 0

    def __init__(
        self,
        simulator: str | gymnasium.Env[Any, Any],
        *,
        describe: str | Describer | Callable[[Any], str] | None = None,
        parse: Callable[[str], Any] | None = None,
        format: str | None = None,
        names: Any = None,
        on_invalid: Literal["retry", "end"] = "retry",
        invalid_reward: float = -1.0,
        simulator_kwargs: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        system_prompt: str | None = None,
        **keywords: Any,
    ) -> None:
        if on_invalid not in ("retry", "end"):
            raise ConfigError(f"on_invalid must be 'retry' or 'end', got {on_invalid!r}")
        self.simulator, limit = self._make(simulator, simulator_kwargs or {})
        self.describer = find_describer(self.simulator, describe)
        space = self.simulator.action_space
        self.format = default_format(space) if format is None else format
        self.on_invalid = on_invalid
        self.invalid_reward = float(invalid_reward)
        self._parse = parse
        self._actions = self._speak_actions(names)
        own_limit = self.max_turns or limit or _DEFAULT_MAX_TURNS
        asked = {key: value for key, value in keywords.items() if value is not None}
        super().__init__(
            max_turns=own_limit if max_turns is None else max_turns,
            **{**self._limits(system_prompt or ""), **asked},
        )
        if self._actions is not None:  # calls are written as the model's template writes them
            self._actions = self._actions.in_dialect(self.renderer.tool_dialect)
        self.answers = None if parse is not None or self._actions is None else self._actions.answers
        self._opening = self._join_system(system_prompt)
        self._seed: int | None = None
        self._choice: Choice | None = None
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

    def _speak_actions(self, names: Any) -> SpokenActions | None:
        """Returns how actions are said; None where ``parse`` reads a space that no format can write."""
        space = self.simulator.action_space
        discrete = isinstance(space, Discrete)
        if self._parse is not None and not discrete:
            return None
        aliases: Mapping[str, int] | None = None
        if names is None and discrete and space == self.simulator.unwrapped.action_space:
            names, aliases = self.describer.names, self.describer.aliases
        return SpokenActions(space, self.format, names=names, aliases=aliases)

    def _limits(self, system_prompt: str) -> dict[str, int]:
        """Returns the limits of ids that the class leaves open; with the bytes tokenizer a byte is an id."""
        hint = "" if self._actions is None else self._actions.choice(None).hint
        said = self.describer.max_chars + len(hint.encode()) + _WHY_CHARS if self.describer.max_chars else 0
        rules = len(f"{system_prompt}{self._said_once()}".encode())
        reply = _TURN_TOKENS if self._parse is not None or self._actions is None else self._actions.max_chars
        needed = {
            "max_turn_tokens": max(_TURN_TOKENS, reply),
            "max_prompt_tokens": max(_PROMPT_TOKENS, said and said + rules),
            "max_feedback_tokens": max(_FEEDBACK_TOKENS, said),
        }
        return {name: getattr(self, name) or least for name, least in needed.items()}

    def _said_once(self) -> str:
        """Returns what is said once: the task, and how a tool is called."""
        called = "" if self._actions is None or self.describer.terse else self._actions.rules()
        return "\n\n".join(text for text in (self.describer.rules(), called) if text)

    def _join_system(self, system_prompt: str | None) -> list[Message]:
        """Returns what stands before the state: one system message, or none."""
        said = "\n\n".join(text for text in (system_prompt, self._said_once()) if text)
        return [Message(role="system", content=said)] if said else []

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
        action = self._read(reply)
        if not action.valid:
            return self._refuse(str(action.reason))
        observation, gain, terminated, truncated, info = self.simulator.step(action.value)
        reward = finite_reward(gain, type(self.simulator.unwrapped).__name__)
        if not (terminated or truncated):
            # What is known where this turn is the last one that max_turns allows.
            self._solved = self._success(observation, reward, False, info)
            return Feedback(self._tell(observation, info), reward=reward, success=self._solved)
        terminated = bool(terminated)
        return Feedback(
            self.describer.outcome(observation, reward, terminated) or None,
            reward=reward,
            terminated=terminated,
            truncated=bool(truncated) and not terminated,
            success=self._success(observation, reward, terminated, info),
        )

    def _success(
        self, observation: Any, reward: float, terminated: bool, info: Mapping[str, Any]
    ) -> bool | None:
        """Returns what the describer knows of success, else what the simulator itself says of it."""
        known = self.describer.success(observation, reward, terminated)
        if known is None and "is_success" in info:
            return bool(info["is_success"])
        return known

    def _tell(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Returns the state in words, and the format unless the describer is terse."""
        state = self.describer.describe(observation)
        if self._actions is not None:
            self._choice = self._actions.choice(info.get("action_mask"))
            if not self.describer.terse and self._parse is None:
                state = f"{state}\n{self._choice.hint}"
        self._state = state
        return state

    def _read(self, reply: Reply) -> ParsedAction:
        """Returns the action in a reply."""
        if self._parse is None:
            assert self._actions is not None  # without a format there is a parser
            return self._actions.read(reply, self._choice)
        action = self._parse(reply.content)
        if not isinstance(action, ParsedAction):
            known = action is not None and self.simulator.action_space.contains(action)
            action = ParsedAction(action, True) if known else ParsedAction(None, False, "not_an_action")
        legal = None if self._choice is None else self._choice.actions
        if action.valid and legal is not None and action.value not in legal:
            return ParsedAction(None, False, "not_legal")
        return action

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

    def extra_info(self) -> Mapping[str, Any]:
        """Returns ``action_mask`` and ``legal_actions`` where the simulator gives a mask."""
        choice = self._choice
        if choice is None or choice.mask is None:
            return {}
        return {"action_mask": list(choice.mask), "legal_actions": list(choice.words)}

    def legal_replies(self) -> tuple[str, ...] | None:
        """Returns the legal actions in the declared format, where they are few."""
        if self._actions is None or self._parse is not None or self._choice is None:
            return None
        return self._actions.replies(self._choice)

    def sample_reply(self) -> str | None:
        """Returns a legal action, drawn uniformly; drawing it does not change what the simulator does."""
        if self._actions is None or self._parse is not None or self._choice is None:
            return None
        if self._player is None:
            self._player = self.np_random.spawn(1)[0]
        return self._actions.draw(self._player, self._choice)

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
